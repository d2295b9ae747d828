"""BatchNorm over the samples of all ranks, as `Trainer(sync_batchnorm=True)` asks for."""

import torch
from lightning.pytorch.plugins.layer_sync import LayerSync, TorchSyncBatchNorm
from torch.nn import Module

from lightning_paral.compat.torch.modules import BatchNorm
from lightning_paral.errors import ConfigurationError


def check_sync_batchnorm(module: Module, layer_sync: LayerSync | None, device: torch.device) -> None:
    """Raise a `ConfigurationError` if `layer_sync` would synchronize BatchNorm on CPU, which torch does not support."""
    if not isinstance(layer_sync, TorchSyncBatchNorm) or device.type != "cpu":
        return
    if any(isinstance(part, BatchNorm) for part in module.modules()):
        raise ConfigurationError(
            "Trainer(sync_batchnorm=True) needs CUDA: torch's SyncBatchNorm does not support CPU tensors. Remove the "
            "argument."
        )


def sync_batchnorm(module: Module, layer_sync: LayerSync | None, device: torch.device) -> None:
    """Replace the BatchNorm layers of `module` with SyncBatchNorm, unless `layer_sync` is `None`.

    Raises:
        ConfigurationError: torch does not support SyncBatchNorm on `device`.
    """
    check_sync_batchnorm(module, layer_sync, device)
    if layer_sync is not None:
        layer_sync.apply(module)
