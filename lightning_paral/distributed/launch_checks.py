"""Check, before processes are started or joined, that devices and ports allow it."""

import socket

import torch
from lightning.fabric.plugins import ClusterEnvironment

from lightning_paral.errors import ConfigurationError


def check_device(device: torch.device) -> None:
    """Raise a `ConfigurationError` if `device` does not exist, or torch.distributed has no backend for it."""
    if device.type not in ("cpu", "cuda"):
        raise ConfigurationError(
            f"lightning_paral trains on CPU and CUDA, but the accelerator gave {str(device)!r}, for which "
            "torch.distributed has no backend. Set `accelerator='cpu'` or `accelerator='gpu'` on a CUDA machine."
        )
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigurationError(
            f"This rank is to use {device}, but it sees {torch.cuda.device_count()} CUDA device(s). "
            "Lower `devices`, or check CUDA_VISIBLE_DEVICES."
        )


def check_local_rank(local_rank: int, num_devices: int) -> None:
    """Raise a `ConfigurationError` if this host runs more processes than the Trainer has devices."""
    if local_rank >= num_devices:
        raise ConfigurationError(
            f"This process was started as local rank {local_rank}, but Trainer(devices=...) gives this host "
            f"{num_devices} device(s). Start {num_devices} per host or set devices={local_rank + 1} or more."
        )


def check_port_is_free(environment: ClusterEnvironment) -> None:
    """Raise a `ConfigurationError` if rank 0, which starts on this host, could not listen on MASTER_PORT."""
    with socket.socket(socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", environment.main_port))
        except OSError as error:
            raise ConfigurationError(
                f"MASTER_PORT={environment.main_port} cannot be listened on: {error.strerror}. Another run may be "
                "using it. Choose a free port, or unset MASTER_PORT to have one chosen."
            ) from None
