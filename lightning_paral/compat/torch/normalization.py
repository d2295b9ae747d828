"""Base classes of torch's normalization layers."""

from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm as InstanceNorm

from lightning_paral.compat.private_name import PrivateName

__all__ = ["BatchNorm", "InstanceNorm"]

_REASON = "there is one public class for each number of dimensions, and their common base class is private"

NAMES = (
    PrivateName(
        name="torch.nn.modules.batchnorm._BatchNorm",
        purpose="to find layers that normalize over the batch",
        reason=_REASON,
        seen="torch 2.11 to 2.13",
    ),
    PrivateName(
        name="torch.nn.modules.instancenorm._InstanceNorm",
        purpose="to find layers whose weights must have the dtype of their statistics",
        reason=_REASON,
        seen="torch 2.11 to 2.13",
    ),
)
