"""The version counter of a tensor."""

from collections.abc import Callable
from operator import attrgetter

from torch import Tensor

from lightning_paral.compat.private_name import PrivateName

NAMES = (
    PrivateName(
        name="torch.Tensor._version",
        purpose="to detect in-place writes to tensors",
        reason="the public torch.autograd.graph.increment_version increments the counter, but no public name reads it",
        seen="torch 2.11 to 2.13",
    ),
)

version_of: Callable[[Tensor], int] = attrgetter("_version")
"""Return the number of in-place operations that have written to a tensor or its views, which share the counter."""
