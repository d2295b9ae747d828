"""The version counter of a tensor."""

from collections.abc import Callable
from operator import attrgetter

from torch import Tensor

from lightning_paral.compat.private_name import PrivateName

NAMES = (
    PrivateName(
        name="torch.Tensor._version",
        purpose="to notice writes to weights",
        reason="torch.autograd.graph.increment_version increments it, but no public function reads it",
        seen="torch 2.11 to 2.13",
    ),
)

version_of: Callable[[Tensor], int] = attrgetter("_version")
"""Return how many in-place operations have written to a tensor or its views, which share the counter."""
