"""Which part of a tensor each rank has: in one dimension, some of the heads, features or positions."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_paral.engines.tensor.collectives import gather_features, own_range, split_features


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

    def local_size(self, num_ranks: int) -> int:
        """Return the size of the dimension on a rank, if the ranks divide each segment."""
        return self.size // num_ranks

    def is_even(self, num_ranks: int) -> bool:
        """Return whether all ranks have the same number of elements of each segment, which is at least one."""
        return all(size and size % num_ranks == 0 for size in self.segments)


def gather_parts(local: Tensor, layout: Layout, group: dist.ProcessGroup) -> Tensor:
    """Return the full tensor of which each rank has the part `local`. *Collective* in the forward pass."""
    last = local.movedim(layout.dim, -1)
    if len(layout.segments) == 1:
        full = gather_features(last, layout.size, group)
    else:
        sizes = [_length(size, group) for size in layout.segments]
        parts = zip(torch.split(last, sizes, dim=-1), layout.segments, strict=True)
        full = torch.cat([gather_features(part, size, group) for part, size in parts], dim=-1)
    return full.movedim(-1, layout.dim).contiguous()  # code may call `view`


def own_parts(full: Tensor, layout: Layout, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's part of `full`, which is equal on all ranks. *Collective* in the backward pass."""
    last = full.movedim(layout.dim, -1)
    if len(layout.segments) == 1:
        own = split_features(last, group)
    else:
        parts = torch.split(last, list(layout.segments), dim=-1)
        own = torch.cat([split_features(part, group) for part in parts], dim=-1)
    return own.movedim(-1, layout.dim).contiguous()


def own_ranges(layout: Layout, group: dist.ProcessGroup) -> Iterator[slice]:
    """Yield the indices in the full dimension that belong to this rank, one slice for each segment."""
    start = 0
    for size in layout.segments:
        own = own_range(size, group)
        yield slice(start + own.start, start + own.stop)
        start += size


def sizes_between(cuts: Iterable[int], size: int) -> tuple[int, ...]:
    """Return the sizes of the segments into which `cuts` divide a dimension of `size`."""
    places = sorted({0, *cuts, size})
    return tuple(stop - start for start, stop in pairwise(places))


def _length(size: int, group: dist.ProcessGroup) -> int:
    own = own_range(size, group)
    length: int = own.stop - own.start
    return length
