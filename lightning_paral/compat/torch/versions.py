"""How often a tensor has been written to."""

from collections.abc import Callable
from operator import attrgetter

from torch import Tensor

from lightning_paral.compat.private_name import PrivateName

NAMES = (
    PrivateName(
        name="torch.Tensor._version",
        purpose="to notice writes to weights",
        reason="torch.autograd.graph.increment_version counts a write, but nothing public reads the count",
        seen="torch 2.11 to 2.13",
    ),
)

version_of: Callable[[Tensor], int] = attrgetter("_version")
"""Return how many in-place operations the memory of a tensor has seen: its views share the count."""
