"""Which rows of a DTensor this rank holds, or which chunk of one divided otherwise."""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from lightning_paral.compat.torch.dtensor import local_of
from lightning_paral.compat.torch.dtensor_layout import compute_local_shape_and_global_offset

Chunk = slice | tuple[slice, ...]
"""An index of the elements that a rank holds: of rows, or of every dimension."""


def own_rows(tensor: Any) -> slice | None:
    """Return the rows that this rank holds of `tensor`, a DTensor: all of one that is replicated.

    `None` if it is divided otherwise than by rows over one dimension of its mesh, as a user's own layout may be.
    """
    sharded = [number for number, placement in enumerate(tensor.placements) if not placement.is_replicate()]
    if not sharded:
        return slice(None)
    placement = tensor.placements[sharded[0]]
    if len(sharded) > 1 or type(placement) is not Shard or placement.dim != 0:
        return None
    mesh, num_rows = tensor.device_mesh, tensor.shape[0]
    per_rank = -(-num_rows // mesh.size(sharded[0]))
    start = min(mesh.get_local_rank(sharded[0]) * per_rank, num_rows)
    return slice(start, min(start + per_rank, num_rows))


def own_chunk(tensor: Any) -> tuple[slice, ...] | None:
    """Return the chunk that this rank holds of `tensor`, a DTensor, as an index into the whole one.

    `None` if there is none: of partial sums, or where FSDP divides again what tensor parallelism has divided.
    """
    if any(type(placement) is not Shard and not placement.is_replicate() for placement in tensor.placements):
        return None
    sizes, starts = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))


def leaves_ranks_empty(tensor: Any) -> bool:
    """Whether some rank holds nothing of `tensor`, a DTensor: known from its shape, and so on all ranks."""
    for number, placement in enumerate(tensor.placements):
        if isinstance(placement, Shard):
            num_ranks, num_rows = tensor.device_mesh.size(number), tensor.shape[placement.dim]
            if -(-num_rows // num_ranks) * (num_ranks - 1) >= num_rows:
                return True
    return False


def is_replicated(tensor: Any) -> bool:
    """Whether every rank holds all of `tensor`, a DTensor."""
    return all(placement.is_replicate() for placement in tensor.placements)


def in_place_of(tensor: Any, chunk: Chunk, *, filled: bool = True) -> Tensor:
    """Return a plain tensor of shape and strides of `tensor`, of which only this rank's `chunk` has its values, if any.

    For operations of which each element of the result depends on the same element alone: they need no gathering.
    """
    local = local_of(tensor)
    # With the strides: random numbers are drawn in the order of memory.
    whole: Tensor = torch.empty_strided(tensor.shape, tensor.stride(), dtype=local.dtype, device=local.device)
    if filled:
        whole.zero_()
        whole[chunk] = local
    return whole


def like(tensor: Any, whole: Tensor, chunk: Chunk) -> Tensor:
    """Return this rank's `chunk` of `whole` as a DTensor laid out like `tensor`. No collective."""
    made: Tensor = DTensor.from_local(
        whole[chunk].clone(),
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )
    return made


def as_full(value: Any) -> Any:
    """Replace DTensors in `value`, also in lists and tuples, by whole tensors of their strides.

    *Collective* where there are any.
    """
    if isinstance(value, DTensor):
        whole = value.full_tensor()
        if whole.stride() == value.stride() or 0 in value.stride():
            return whole
        return torch.empty_strided(whole.shape, value.stride(), dtype=whole.dtype, device=whole.device).copy_(whole)
    if isinstance(value, list | tuple):
        return type(value)(map(as_full, value))
    return value
