"""The chunk of a DTensor that this rank holds."""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_paral.checkpoint.dtensor_chunks import chunk_of_dtensor, has_empty_chunk, is_chunked
from lightning_paral.checkpoint.layout import Chunk
from lightning_paral.compat.torch.dtensor import local_of

Index = tuple[slice, ...]
"""An index of the elements that a rank holds: a slice for every dimension."""


def own_chunk(tensor: Any) -> Index | None:
    """Return the chunk that this rank holds of `tensor`, a DTensor, as an index into the full tensor.

    `None` if it holds no chunk, as for partial sums.
    """
    chunk = chunk_of_dtensor(tensor) if is_chunked(tensor) else None
    if chunk is None:
        return None
    # If tensor parallelism leaves no columns to a rank, FSDP2 also gives it no rows (torch 2.13).
    return chunk.index if chunk.numel else Chunk(chunk.offsets, tuple(local_of(tensor).shape)).index


def has_empty_shard(tensor: Any) -> bool:
    """Return whether any rank has an empty shard of `tensor`, a DTensor. The result is equal on all ranks."""
    return has_empty_chunk(tensor)


def is_replicated(tensor: Any) -> bool:
    """Return whether every rank holds all of `tensor`, a DTensor."""
    return all(placement.is_replicate() for placement in tensor.placements)


def full_from_chunk(tensor: Any, chunk: Index, *, filled: bool = True) -> Tensor:
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


def shard_like(tensor: Any, full: Tensor, chunk: Index) -> Tensor:
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
