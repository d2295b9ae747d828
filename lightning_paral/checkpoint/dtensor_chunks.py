"""Which chunk of a DTensor each rank holds, and which ranks hold the same one."""

from collections.abc import Sequence
from functools import lru_cache
from itertools import product

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_paral.checkpoint.layout import Chunk
from lightning_paral.compat.torch.dtensor import root_mesh, sharded_dim, split_factor
from lightning_paral.errors import CheckpointError


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


def is_chunked(value: DTensor) -> bool:
    """Return whether each rank of the mesh holds a chunk of `value`, rather than, for example, a partial sum."""
    is_partial = any(sharded_dim(each) is None and not each.is_replicate() for each in value.placements)
    return not is_partial and _find_splits(value) is not None


def chunks_by_rank(value: DTensor) -> dict[int, Chunk]:
    """Return the chunks of `value` that together are the full tensor, by the global rank that holds them.

    The ranks are those of the mesh that have this rank's coordinate in the dimensions without sharding.

    Raises:
        CheckpointError: the local tensors are not chunks of `value`.
    """
    mesh, splits = value.device_mesh, _splits(value)
    own = mesh.get_coordinate()
    assert own is not None
    sharded = {number for splits_of_dim in splits for number in splits_of_dim}
    ranks = mesh.mesh[tuple(slice(None) if number in sharded else index for number, index in enumerate(own))]
    ranges = [range(mesh.size(number)) if number in sharded else (own[number],) for number in range(mesh.ndim)]
    coordinates = product(*ranges)  # in the order of `ranks.flatten()`
    return {
        rank: _chunk_at(value, splits, coordinate)
        for rank, coordinate in zip(ranks.flatten().tolist(), coordinates, strict=True)
    }


def ranks_with_same_chunk(value: DTensor) -> tuple[int, ...]:
    """Return the global ranks that hold the same elements of `value` as this rank, in ascending order.

    These include ranks outside of the mesh of `value`: if it is a slice of a larger mesh, every parallel slice holds
    the same tensor. The result is empty if this rank is not in the mesh.

    Raises:
        CheckpointError: the local tensors are not chunks of `value`.
    """
    mesh, splits = value.device_mesh, _splits(value)
    own = mesh.get_coordinate()
    if own is None:
        return ()
    sharded = {number for splits_of_dim in splits for number in splits_of_dim}
    at = tuple(index if number in sharded else slice(None) for number, index in enumerate(own))
    root = root_mesh(mesh)
    if root.size() == mesh.size():
        return tuple(sorted(mesh.mesh[at].flatten().tolist()))
    slices = _parallel_slices(tuple(root.mesh.flatten().tolist()), tuple(mesh.mesh.flatten().tolist()))
    positions = torch.arange(mesh.size(), device="cpu").view(mesh.shape)[at].flatten().tolist()
    return tuple(sorted(ranks[position] for ranks in slices for position in positions))


def writes_chunk(value: DTensor) -> bool:
    """Return whether this rank is the first of those that hold the same elements of `value`."""
    coordinate = value.device_mesh.get_coordinate()
    if coordinate is None:
        return False
    return ranks_with_same_chunk(value)[0] == int(value.device_mesh.mesh[tuple(coordinate)].item())


@lru_cache(maxsize=64)
def _parallel_slices(root: tuple[int, ...], ranks: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Return the slices of a mesh that are parallel to one of them, including itself.

    Args:
        root: the ranks of the mesh, flattened.
        ranks: the ranks of the slice, flattened.
    """
    position_of = {rank: position for position, rank in enumerate(root)}
    offsets = [position_of[rank] - position_of[ranks[0]] for rank in ranks]
    found: list[tuple[int, ...]] = []
    seen: set[int] = set()
    for start in range(len(root)):
        if start not in seen:  # the first position that is in no slice yet is the first of its own slice
            positions = [start + offset for offset in offsets]
            seen.update(positions)
            found.append(tuple(root[position] for position in positions))
    return tuple(found)


def _splits(value: DTensor) -> list[list[int]]:
    """Return, for each dimension of `value`, the dimensions of the mesh that divide it, in the order of division."""
    splits = _find_splits(value)
    if splits is None or not is_chunked(value):
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
