"""The rows, or the chunk, of a DTensor that this rank holds."""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from lightning_paral.compat.torch.dtensor import local_of
from lightning_paral.compat.torch.dtensor_layout import compute_local_shape_and_global_offset

Chunk = slice | tuple[slice, ...]
"""An index of the elements that a rank holds: a slice of rows, or a slice for every dimension."""


def own_rows(tensor: Any) -> slice | None:
    """Return the rows that this rank holds of `tensor`, a DTensor; all rows if it is replicated.

    `None` if it is not sharded by rows over one dimension of its mesh, as may be the case if the user sharded it.
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
    """Return the chunk that this rank holds of `tensor`, a DTensor, as an index into the full tensor.

    `None` if it holds no chunk: for partial sums, and if FSDP shards a tensor that tensor parallelism has sharded.
    """
    if any(type(placement) is not Shard and not placement.is_replicate() for placement in tensor.placements):
        return None
    sizes, starts = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))


def has_empty_shard(tensor: Any) -> bool:
    """Return whether any rank has an empty shard of `tensor`, a DTensor. The result is equal on all ranks."""
    for number, placement in enumerate(tensor.placements):
        if isinstance(placement, Shard):
            num_ranks, num_rows = tensor.device_mesh.size(number), tensor.shape[placement.dim]
            if -(-num_rows // num_ranks) * (num_ranks - 1) >= num_rows:
                return True
    return False


def is_replicated(tensor: Any) -> bool:
    """Return whether every rank holds all of `tensor`, a DTensor."""
    return all(placement.is_replicate() for placement in tensor.placements)


def full_from_chunk(tensor: Any, chunk: Chunk, *, filled: bool = True) -> Tensor:
    """Return a plain tensor with the full shape and strides of `tensor`, in which only this rank's chunk has values.

    Elementwise operations can run on it, without a collective.

    Args:
        tensor: a DTensor.
        chunk: index of the chunk of this rank.
        filled: if `False`, all values are undefined; otherwise those outside the chunk are 0.
    """
    local = local_of(tensor)
    # With the same strides, because random numbers are drawn in the order of memory.
    full: Tensor = torch.empty_strided(tensor.shape, tensor.stride(), dtype=local.dtype, device=local.device)
    if filled:
        full.zero_()
        full[chunk] = local
    return full


def shard_like(tensor: Any, full: Tensor, chunk: Chunk) -> Tensor:
    """Return `full`, of which this rank holds `chunk`, as a DTensor with the layout of `tensor`. No collective."""
    sharded: Tensor = DTensor.from_local(
        full[chunk].clone(),
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=full.shape,
        stride=full.stride(),
    )
    return sharded


def as_full(value: Any) -> Any:
    """Replace DTensors in `value`, including those in lists and tuples, by full tensors with the same strides.

    *Collective* if there are any.
    """
    if isinstance(value, DTensor):
        full = value.full_tensor()
        if full.stride() == value.stride() or 0 in value.stride():
            return full
        return torch.empty_strided(full.shape, value.stride(), dtype=full.dtype, device=full.device).copy_(full)
    if isinstance(value, list | tuple):
        return type(value)(map(as_full, value))
    return value
