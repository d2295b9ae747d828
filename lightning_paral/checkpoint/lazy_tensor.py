"""Tensors of a checkpoint that are read when they are used, and only as far as they are needed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_paral.checkpoint.layout import Chunk, chunk_of_dtensor, chunks_of_flat_range, full_chunk, intersection
from lightning_paral.compat.torch.tensors import WithoutMemory, tree_map_only, without_memory
from lightning_paral.errors import CheckpointError


@dataclass(frozen=True)
class StoredChunk:
    """A chunk of a tensor that is stored in one file."""

    chunk: Chunk

    read: Callable[[], Tensor]
    """Returns the elements, in shape `chunk.sizes`; memory-mapped if the file is local."""

    location: tuple[str, int] | None = None
    """The name of the file and the offset in bytes. Chunks of tied tensors have the same location."""


class LazyTensor(WithoutMemory):
    """A tensor of a checkpoint that has a shape and a dtype but no memory, and is stored in chunks.

    Any operation reads the full tensor and is applied to the values. Renaming and deleting entries of a `state_dict`
    does not read anything.
    """

    chunks: list[StoredChunk]

    @staticmethod
    def __new__(
        cls, shape: Sequence[int], dtype: torch.dtype, chunks: list[StoredChunk], device: torch.device | None = None
    ) -> "LazyTensor":
        """Create the tensor without reading it. It will be read to `device`; `None` means the host."""
        stored = without_memory(cls, shape, dtype, device)
        stored.chunks = chunks
        return stored

    def __init__(self, *args: Any) -> None:
        super().__init__()

    def __deepcopy__(self, memo: Any) -> Tensor:
        return self.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return materialize(self).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def requires_grad_(self, *_: Any) -> Tensor:
        """Raise a `CheckpointError`, because a parameter without memory could not be updated."""
        raise CheckpointError(
            "`load_state_dict(..., assign=True)` got tensors of a sharded checkpoint that have not been read yet. Omit "
            "`assign`, or read them first: `{name: value.clone() for name, value in state_dict.items()}`."
        )

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
        return f"LazyTensor(shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:
            return args[0]
        if func is torch.ops.aten.copy_.default and isinstance(args[1], LazyTensor):
            target = args[0]
            if target.shape == args[1].shape:
                read_chunk(args[1], full_chunk(target.shape), target)
                return target
        args, kwargs = tree_map_only(LazyTensor, materialize, (args, kwargs or {}))
        return func(*args, **kwargs)


def materialize(stored: Tensor) -> Tensor:
    """Return a `LazyTensor` as an ordinary tensor of its dtype on its device; return other tensors unchanged."""
    if not isinstance(stored, LazyTensor):
        return stored
    values = torch.empty(stored.shape, dtype=stored.dtype, device=stored.device)
    read_chunk(stored, full_chunk(stored.shape), values)
    return values


def read_chunk(stored: Tensor, chunk: Chunk, target: Tensor) -> None:
    """Copy a chunk of `stored` to `target`, a tensor of shape `chunk.sizes` with any dtype, on any device."""
    if not isinstance(stored, LazyTensor):
        target.copy_(stored[chunk.index])
        return
    for saved in stored.chunks:
        common = intersection(saved.chunk, chunk)
        if common is not None:
            target[common.relative_to(chunk).index].copy_(saved.read()[common.relative_to(saved.chunk).index])


def read_flat_range(stored: Tensor, start: int, target: Tensor) -> None:
    """Copy elements `[start, start + len(target))` of the flattened `stored` to the 1-dimensional `target`."""
    position = 0
    for chunk in chunks_of_flat_range(stored.shape, start, start + target.numel()):
        read_chunk(stored, chunk, target[position : position + chunk.numel].view(chunk.sizes))
        position += chunk.numel


def read_into(stored: Tensor, target: Tensor) -> None:
    """Fill `target`, a full tensor or this rank's shard of a DTensor, with the values of `stored`."""
    with torch.no_grad():
        if isinstance(target, DTensor):
            chunk = chunk_of_dtensor(target)
            if chunk is not None and chunk.numel:
                read_chunk(stored, chunk, target.to_local())
        elif target.numel():
            read_chunk(stored, full_chunk(stored.shape), target)
