"""Which part of a tensor each rank has: in one dimension, some of the heads, features or positions."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

import torch.distributed as dist
from torch import Tensor

from lightning_paral.engines.tensor.collectives import gather_features, split_features


@dataclass(frozen=True)
class Layout:
    """The dimension in which a tensor is split, and the segments of this dimension.

    The dimension consists of segments one after another, such as the queries, the keys and the values that one linear
    layer computes. Each rank has its `own_range` of each segment.
    """

    dim: int
    """Counted from the first dimension."""
    segments: tuple[int, ...]
    """The full sizes of the segments."""

    @property
    def size(self) -> int:
        """The full size of the dimension."""
        return sum(self.segments)

    def moved(self, dim: int) -> "Layout":
        """Return the same segments in another dimension."""
        return Layout(dim, self.segments)

    def is_even(self, num_ranks: int) -> bool:
        """Return whether all ranks have the same number of elements of each segment, which is at least one."""
        return all(size and size % num_ranks == 0 for size in self.segments)


def gather_parts(local: Tensor, layout: Layout, group: dist.ProcessGroup) -> Tensor:
    """Return the full tensor of which each rank has the part `local`. *Collective* in the forward pass."""
    full = gather_features(local.movedim(layout.dim, -1), layout.segments, group)
    return full.movedim(-1, layout.dim).contiguous()  # code may call `view`


def own_parts(full: Tensor, layout: Layout, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's part of `full`, which is equal on all ranks. *Collective* in the backward pass."""
    own = split_features(full.movedim(layout.dim, -1), layout.segments, group)
    return own.movedim(-1, layout.dim).contiguous()


def sizes_between(cuts: Iterable[int], size: int) -> tuple[int, ...]:
    """Return the sizes of the segments into which `cuts` divide a dimension of `size`."""
    places = sorted({0, *cuts, size})
    return tuple(stop - start for start, stop in pairwise(places))
