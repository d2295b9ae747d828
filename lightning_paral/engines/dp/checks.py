"""Reject modules and loaders that cannot be replicated, before the first step."""

from collections.abc import Sequence

import torch
from lightning.pytorch import LightningModule
from torch.jit import ScriptModule
from torch.nn.parameter import is_lazy
from torch.utils.data import DataLoader

from lightning_paral.compat.torch.modules import is_compiled
from lightning_paral.data.loaders import samplers
from lightning_paral.distributed.process_group import check_device
from lightning_paral.errors import ConfigurationError


def check_replicable(module: LightningModule, *, is_fit: bool) -> None:
    """Raise a `ConfigurationError` if copies of `module` would not behave like `module` in a fit or another run."""
    if is_fit and not module.automatic_optimization:
        raise ConfigurationError(
            f"{type(module).__name__} uses manual optimization. Under paral_dp a step runs in replicas, each of "
            "them with the same optimizers. Use automatic optimization, or paral_ddp."
        )
    for name, part in module.named_modules():
        kind = "compiled" if is_compiled(part) else "a ScriptModule" if isinstance(part, ScriptModule) else None
        if kind is not None:
            raise ConfigurationError(
                f"{name or type(module).__name__} is {kind}, which cannot be replicated within one process. "
                f"Use paral_ddp, or one device."
            )
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if is_lazy(tensor):
            raise ConfigurationError(
                f"{name} has no shape yet. Run a batch through the module before training, so that lazy modules are "
                "initialized, or use paral_ddp."
            )


def check_draws_all(loader: object) -> None:
    """Raise a `ConfigurationError` if `loader` draws only some of the samples: no other process draws the rest."""
    for sampler in samplers(loader) if isinstance(loader, DataLoader) else ():
        num_replicas = getattr(sampler, "num_replicas", 1)
        if num_replicas > 1:
            raise ConfigurationError(
                f"{type(sampler).__name__}(num_replicas={num_replicas}) draws one of {num_replicas} shards of the "
                "data, but paral_dp runs in one process, and nothing would draw the others. Leave out the sampler, or "
                "create it with **self.trainer.distributed_sampler_kwargs."
            )


def check_one_process(
    devices: Sequence[torch.device], num_nodes: int, num_processes: int, *, sync_batchnorm: bool
) -> None:
    """Raise a `ConfigurationError` if the Trainer asks for several processes, or if a device does not exist.

    Args:
        devices: devices of the replicas.
        num_nodes: number of nodes that the Trainer was given.
        num_processes: number of processes that a launcher started.
        sync_batchnorm: whether `Trainer(sync_batchnorm=True)` was set.
    """
    if num_nodes > 1 or num_processes > 1:
        found = f"num_nodes={num_nodes}" if num_nodes > 1 else f"{num_processes} processes were started"
        raise ConfigurationError(
            f"paral_dp is one process on one node, but {found}. Start a single process, or use paral_ddp."
        )
    for device in devices:
        check_device(device)
    if sync_batchnorm and len(devices) > 1:
        raise ConfigurationError(
            "Trainer(sync_batchnorm=True) needs a process per device. Leave it out, so that each replica "
            "normalizes with the statistics of its own samples, or use paral_ddp."
        )
