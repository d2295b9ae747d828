"""BatchNorm over the samples of all ranks, as `Trainer(sync_batchnorm=True)` asks for."""

import torch
from lightning.pytorch.plugins.layer_sync import LayerSync, TorchSyncBatchNorm
from torch.nn import Module

from lightning_paral.compat.torch.normalization import BatchNorm
from lightning_paral.errors import ConfigurationError


def check_sync_batchnorm(module: Module, layer_sync: LayerSync | None, device: torch.device) -> None:
    """Raise a `ConfigurationError` if BatchNorm is to be synchronized on a device for which torch cannot."""
    if not isinstance(layer_sync, TorchSyncBatchNorm) or device.type != "cpu":
        return
    if any(isinstance(part, BatchNorm) for part in module.modules()):
        raise ConfigurationError(
            "Trainer(sync_batchnorm=True) needs CUDA: torch's SyncBatchNorm takes no CPU tensors. Leave it out."
        )


def sync_batchnorm(module: Module, layer_sync: LayerSync | None, device: torch.device) -> None:
    """Replace the BatchNorm layers of `module` by SyncBatchNorm, if `layer_sync` asks for it.

    Raises:
        ConfigurationError: torch has no SyncBatchNorm for the device.
    """
    check_sync_batchnorm(module, layer_sync, device)
    if layer_sync is not None:
        layer_sync.apply(module)
