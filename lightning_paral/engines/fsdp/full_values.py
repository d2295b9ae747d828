"""Full values of DTensors, and the chunk of them that this rank holds."""

from typing import Any

import torch
from torch import Tensor

from lightning_paral.checkpoint.layout import Chunk, chunk_of_dtensor, dtensor_like, is_chunked
from lightning_paral.compat.torch.dtensor import local_of
from lightning_paral.errors import ConfigurationError

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


def _chunk_to_write(tensor: Any) -> Index:
    chunk = own_chunk(tensor)
    if chunk is None:
        raise ConfigurationError(
            f"A DTensor with placements {tensor.placements} was written to, which has no chunk for each rank. Write to "
            "the parameter itself, or to tensor.full_tensor()."
        )
    return chunk


@torch.no_grad()
def keep_chunk(tensor: Any, full: Tensor) -> None:
    """Copy this rank's chunk of `full` to `tensor`, a DTensor. No collective."""
    local = local_of(tensor)
    if local.numel():
        local.copy_(full[_chunk_to_write(tensor)])


def full_from_chunk(tensor: Any) -> Tensor:
    """Return a plain tensor with the shape and strides of `tensor`, a DTensor; only this rank's chunk has its values.

    Operations on each element can run on it, without a collective.
    """
    local = local_of(tensor)
    full = _empty_full(tensor, local).zero_()
    full[_chunk_to_write(tensor)] = local
    return full


def _empty_full(tensor: Any, local: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=local.dtype, device=local.device)


def shard_like(tensor: Any, full: Tensor) -> Tensor:
    """Return `full` as a DTensor with the layout of `tensor`. No collective."""
    return dtensor_like(full[_chunk_to_write(tensor)].clone(), tensor)


@torch.no_grad()
def as_full(tensor: Any) -> Tensor:
    """Return a full copy of a DTensor with the same strides: random numbers are drawn in memory order. *Collective*."""
    full: Tensor = tensor.detach().full_tensor()  # otherwise an error in torch 2.11
    if 0 in tensor.stride() or tensor.numel() == 0:
        return full.clone()
    return _empty_full(tensor, full).copy_(full)
