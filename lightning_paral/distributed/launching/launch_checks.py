"""Check devices and the port before processes are started or join a process group."""

import socket

import torch
from lightning.fabric.plugins import ClusterEnvironment

from lightning_paral.errors import ConfigurationError


def check_device(device: torch.device) -> None:
    """Raise a `ConfigurationError` if `device` does not exist or torch.distributed has no backend for it."""
    if device.type not in ("cpu", "cuda"):
        raise ConfigurationError(
            f"lightning_paral trains on CPU and CUDA, but the accelerator selected {str(device)!r}, for which "
            "torch.distributed has no backend. Set `accelerator='cpu'` or `accelerator='gpu'` on a CUDA machine."
        )
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigurationError(
            f"This rank was assigned {device}, but only {torch.cuda.device_count()} CUDA device(s) are visible to it. "
            "Lower `devices`, or check CUDA_VISIBLE_DEVICES."
        )


def check_local_rank(local_rank: int, num_devices: int) -> None:
    """Raise a `ConfigurationError` if this node runs more processes than the Trainer has devices."""
    if local_rank >= num_devices:
        raise ConfigurationError(
            f"This process was started as local rank {local_rank}, but Trainer(devices=...) gives this node "
            f"{num_devices} device(s). Start as many processes per node as devices, or set devices={local_rank + 1} or "
            "more."
        )


def check_port_is_free(environment: ClusterEnvironment) -> None:
    """Raise a `ConfigurationError` if rank 0, which starts on this node, cannot listen on MASTER_PORT."""
    with socket.socket(socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", environment.main_port))
        except OSError as error:
            raise ConfigurationError(
                f"Cannot listen on MASTER_PORT={environment.main_port}: {error.strerror}. Another run may be using the "
                "port. Choose a free one, or unset MASTER_PORT to let Lightning choose one."
            ) from None
