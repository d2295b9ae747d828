"""The version counter of a tensor."""

from collections.abc import Callable
from operator import attrgetter

from torch import Tensor

from lightning_paral.compat.private_name import Names

NAMES: Names = {
    "torch.Tensor": {"_version": "detect in-place writes to tensors"},
}

version_of: Callable[[Tensor], int] = attrgetter("_version")
"""Return the number of in-place operations that have written to a tensor or its views, which share the counter."""
