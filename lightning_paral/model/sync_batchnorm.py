"""`Trainer(sync_batchnorm=True)`."""

from typing import Any

import torch
from lightning.pytorch.plugins.layer_sync import TorchSyncBatchNorm
from torch.nn import Module
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_paral.errors import ConfigurationError


def check_sync_batchnorm(layer_sync: Any, module: Module, device: torch.device) -> None:
    """Check that batch normalization in `module` can use all ranks' samples, if `layer_sync` is to see to it.

    Raises:
        ConfigurationError: torch has it on accelerators only.
    """
    is_torchs = isinstance(layer_sync, TorchSyncBatchNorm) and device.type == "cpu"
    if is_torchs and any(isinstance(part, _BatchNorm) for part in module.modules()):
        raise ConfigurationError(
            "Trainer(sync_batchnorm=True) needs CUDA: torch's SyncBatchNorm takes no CPU tensors. Leave it out."
        )
