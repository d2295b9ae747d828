"""Base classes of torch's normalization layers."""

from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm as InstanceNorm

from lightning_paral.compat.private_name import Names

__all__ = ["BatchNorm", "InstanceNorm"]


NAMES: Names = {
    "torch.nn.modules.batchnorm": {"_BatchNorm": "find layers that normalize over the batch"},
    "torch.nn.modules.instancenorm": {
        "_InstanceNorm": "find layers whose weights must have the dtype of their statistics",
    },
}
