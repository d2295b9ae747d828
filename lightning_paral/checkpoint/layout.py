"""Chunks and flat ranges: how the elements of a tensor are divided among ranks and files, and where DTensors are."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_paral.compat.torch.dtensor import root_mesh, sharded_dim, split_factor
from lightning_paral.errors import CheckpointError

_MAX_COMPARED = 500_000
"""Limit for the number of pairs of chunks that are compared for one tensor. Comparing that many takes about a second.

4,096 ranks that shard a tensor in both of two dimensions need 130,000 pairs.
"""


@dataclass(frozen=True)
class Chunk:
    """An axis-aligned box of a tensor: `offsets[d] <= index[d] < offsets[d] + sizes[d]` in each dimension d."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        """The number of elements; 1 for the chunk of a 0-dimensional tensor."""
        return prod(self.sizes)

    @property
    def index(self) -> tuple[slice, ...]:
        """The index that selects this chunk: `tensor[chunk.index]`."""
        return tuple(slice(start, start + size) for start, size in zip(self.offsets, self.sizes, strict=True))

    def relative_to(self, outer: "Chunk") -> "Chunk":
        """Return this chunk with its offsets relative to those of `outer`."""
        return Chunk(tuple(a - b for a, b in zip(self.offsets, outer.offsets, strict=True)), self.sizes)


def full_chunk(shape: Sequence[int]) -> Chunk:
    """Return the chunk that contains all elements of a tensor."""
    return Chunk((0,) * len(shape), tuple(shape))


def intersection(first: Chunk, second: Chunk) -> Chunk | None:
    """Return the chunk of the elements that are in both chunks; `None` if there are none."""
    starts = [max(a, b) for a, b in zip(first.offsets, second.offsets, strict=True)]
    stops = [
        min(a + m, b + n) for a, m, b, n in zip(first.offsets, first.sizes, second.offsets, second.sizes, strict=True)
    ]
    sizes = tuple(stop - start for start, stop in zip(starts, stops, strict=True))
    return Chunk(tuple(starts), sizes) if all(size > 0 for size in sizes) else None


def chunks_of_flat_range(shape: Sequence[int], start: int, stop: int) -> list[Chunk]:
    """Return the elements `[start, stop)` of a flattened row-major tensor as chunks, in memory order.

    There are at most `2 * len(shape) - 1` chunks, and each is contiguous in memory.
    """
    if start >= stop:
        return []
    if not shape:
        return [Chunk((), ())]
    row = prod(shape[1:])
    first, head = divmod(start, row)
    last, tail = divmod(stop, row)
    if first == last:
        return _in_row(shape, first, head, tail)
    chunks = []
    if head:
        chunks += _in_row(shape, first, head, row)
        first += 1
    if first < last:
        chunks.append(Chunk((first, *(0 for _ in shape[1:])), (last - first, *shape[1:])))
    return chunks + _in_row(shape, last, 0, tail)


def _in_row(shape: Sequence[int], row: int, start: int, stop: int) -> list[Chunk]:
    return [Chunk((row, *chunk.offsets), (1, *chunk.sizes)) for chunk in chunks_of_flat_range(shape[1:], start, stop)]


def flat_range_of(shape: Sequence[int], chunk: Chunk) -> tuple[int, int] | None:
    """Return the flat range `[start, stop)` of `chunk` in a row-major tensor; `None` if it is not contiguous."""
    start = 0
    for size, offset in zip(shape, chunk.offsets, strict=True):
        start = start * size + offset
    return (start, start + chunk.numel) if chunks_of_flat_range(shape, start, start + chunk.numel) == [chunk] else None


def coverage_fault(shape: Sequence[int], chunks: Sequence[Chunk]) -> str | None:
    """Describe why `chunks` do not cover a tensor exactly once; return `None` if they do.

    The fault is a chunk that is out of bounds, an overlap, or missing elements.
    """
    everything = full_chunk(shape)
    for chunk in chunks:
        if len(chunk.sizes) != len(shape) or (chunk.numel and intersection(chunk, everything) != chunk):
            return f"chunk {chunk.offsets}+{chunk.sizes} is outside of shape {tuple(shape)}"
    filled = [chunk for chunk in chunks if chunk.numel]
    # Sorting along the dimension with the most different offsets leaves the fewest pairs to compare.
    axis = max(range(len(shape)), key=lambda dim: len({chunk.offsets[dim] for chunk in filled}), default=0)
    filled.sort(key=lambda chunk: chunk.offsets[axis : axis + 1])
    compared = 0
    for number, chunk in enumerate(filled):
        for following in range(number + 1, len(filled)):
            other = filled[following]
            if shape and other.offsets[axis] >= chunk.offsets[axis] + chunk.sizes[axis]:
                break  # chunks are sorted by this offset, so no later one overlaps either
            if intersection(chunk, other) is not None:
                return f"chunks {chunk.offsets}+{chunk.sizes} and {other.offsets}+{other.sizes} overlap"
            compared += 1
            if compared > _MAX_COMPARED:
                return f"its {len(filled)} chunks are cut so irregularly that they cannot be checked"
    missing = prod(shape) - sum(chunk.numel for chunk in filled)
    return f"{missing} of {prod(shape)} elements are in no chunk" if missing else None


def chunk_of_dtensor(value: DTensor) -> Chunk | None:
    """Return the position of this rank's local tensor in `value`; `None` if the rank is not in the mesh.

    Raises:
        CheckpointError: the local tensor is not a chunk of `value`, but, for example, a partial sum.
    """
    coordinate = value.device_mesh.get_coordinate()
    return None if coordinate is None else _chunk_at(value, _splits(value), coordinate)


def dtensor_like(local: Tensor, value: DTensor) -> Tensor:
    """Return a DTensor with the shape and the layout of `value`, whose local tensor is `local`. No collective."""
    made: Tensor = DTensor.from_local(
        local,
        value.device_mesh,
        value.placements,
        run_check=False,
        shape=value.shape,
        stride=value.stride(),
    )
    return made


def writes_chunk(value: DTensor) -> bool:
    """Return whether this rank is the first of those that hold the same elements of `value`.

    If the mesh of `value` is a slice of a larger mesh, every parallel slice holds the same tensor.

    Raises:
        CheckpointError: the local tensors are not chunks of `value`.
    """
    mesh, sharded = value.device_mesh, {number for numbers in _splits(value) for number in numbers}
    coordinate = mesh.get_coordinate()
    if coordinate is None or any(index for number, index in enumerate(coordinate) if number not in sharded):
        return False
    return bool((mesh.mesh == root_mesh(mesh).mesh.flatten()[0]).any())


def _splits(value: DTensor) -> list[list[int]]:
    """Return, for each dimension of `value`, the dimensions of the mesh that divide it, in the order of division."""
    splits = _find_splits(value)
    if splits is None or any(sharded_dim(each) is None and not each.is_replicate() for each in value.placements):
        raise CheckpointError(
            f"A DTensor with placements {value.placements} cannot be saved or loaded. Redistribute it to Shard or "
            "Replicate first."
        )
    return splits


def _find_splits(value: DTensor) -> list[list[int]] | None:
    """Return what `_splits` returns; `None` if it is not known where the shards are."""
    mesh, splits = value.device_mesh, [list[int]() for _ in value.shape]
    for number, placement in reversed(list(enumerate(value.placements))):
        dim = sharded_dim(placement)
        if dim is None:
            continue
        factor = split_factor(placement)
        if factor == 1:
            splits[dim].insert(0, number)
            continue
        # Tensor parallelism has divided this dimension before FSDP2, although its dimension of the mesh is later.
        if factor != torch.Size(mesh.size(later) for later in splits[dim]).numel():
            return None
        splits[dim].append(number)
    return splits


def _chunk_at(value: DTensor, splits: Sequence[Sequence[int]], coordinate: Sequence[int]) -> Chunk:
    # torch's own function reports wrong offsets for some sizes that are not divisible (torch 2.13): if 7 rows are split
    # over 2 tensor ranks and then over 3 others, it gives the last row to the wrong tensor rank.
    offsets, sizes = [], []
    for size, numbers in zip(value.shape, splits, strict=True):
        start = 0
        for number in numbers:
            per_rank = -(-size // value.device_mesh.size(number))
            skipped = min(coordinate[number] * per_rank, size)
            start, size = start + skipped, min(per_rank, size - skipped)
        offsets.append(start)
        sizes.append(size)
    return Chunk(tuple(offsets), tuple(sizes))
