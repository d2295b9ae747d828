"""Tensors that lie in a checkpoint: read when they are touched, and only the part that is wanted."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_paral.checkpoint.layout import Chunk, chunks_of_flat_range, flat_range_of, full_chunk, intersection
from lightning_paral.checkpoint.shards import chunk_of_dtensor, flat
from lightning_paral.compat.torch.pytree import tree_map_only
from lightning_paral.compat.torch.wrapper_tensors import without_memory
from lightning_paral.errors import CheckpointError


@dataclass(frozen=True)
class StoredChunk:
    """A box of a tensor in one file."""

    chunk: Chunk

    values: Callable[[], Tensor]
    """Returns the box's elements in its shape; mapped from the file, not read, where the file is local."""

    place: tuple[str, int] | None = None
    """The file and the offset there: pieces of tied tensors have the same."""


class LazyTensor(Tensor):
    """A tensor of a checkpoint, in pieces, with shape and dtype but no memory.

    Any operation reads all of it and works on the values; renaming and deleting entries of a `state_dict` reads none.
    """

    pieces: list[StoredChunk]

    @staticmethod
    def __new__(
        cls, shape: Sequence[int], dtype: torch.dtype, pieces: list[StoredChunk], device: torch.device | None = None
    ) -> "LazyTensor":
        """Make the tensor without reading it; `device`, the host if `None`, is where it is read to."""
        stored = without_memory(cls, shape, dtype, device)
        stored.pieces = pieces
        return stored

    def __init__(self, *args: Any) -> None:
        super().__init__()

    def __deepcopy__(self, memo: Any) -> Tensor:
        return self.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return materialize(self).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def requires_grad_(self, *_: Any) -> Tensor:
        """Refuse to be made a parameter: its values could not be changed."""
        raise CheckpointError(
            "`load_state_dict(..., assign=True)` was given tensors of a sharded checkpoint that were not read yet. "
            "Leave out `assign`, or read them first: `{name: value.clone() for name, value in state_dict.items()}`."
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
    """Return all of `stored` as an ordinary tensor on its device, of its own dtype."""
    if not isinstance(stored, LazyTensor):
        return stored
    values = torch.empty(stored.shape, dtype=stored.dtype, device=stored.device)
    read_chunk(stored, full_chunk(stored.shape), values)
    return values


def read_chunk(stored: Tensor, chunk: Chunk, target: Tensor) -> None:
    """Copy a box of `stored` into `target`, a tensor of the box's sizes and of any dtype and device."""
    if not isinstance(stored, LazyTensor):
        target.copy_(stored[chunk.index])
        return
    for piece in stored.pieces:
        common = intersection(piece.chunk, chunk)
        if common is not None:
            target[common.seen_from(chunk).index].copy_(piece.values()[common.seen_from(piece.chunk).index])


def read_flat_range(stored: Tensor, start: int, target: Tensor) -> None:
    """Copy elements `[start, start + len(target))` of flattened `stored` into `target`, 1-dimensional."""
    position = 0
    for chunk in chunks_of_flat_range(stored.shape, start, start + target.numel()):
        read_chunk(stored, chunk, target[position : position + chunk.numel].view(chunk.sizes))
        position += chunk.numel


def stretches(stored: Tensor, max_bytes: int) -> Iterator[Tensor]:
    """Return all elements in their order, 1-dimensional, at most `max_bytes` at a time.

    They are mapped from the file, not copied, where its pieces are runs of the flattened tensor, as those of our own
    checkpoints are. Else they come in memory that is used again.
    """
    step = max(1, max_bytes // stored.dtype.itemsize)
    runs = _runs(stored)
    if runs is not None:
        for values in runs:
            mapped = flat(values())
            for start in range(0, mapped.numel(), step):
                yield mapped[start : start + step]
        return
    memory = torch.empty(min(step, stored.numel()), dtype=stored.dtype)
    for start in range(0, stored.numel(), step):
        part = memory[: stored.numel() - start]
        read_flat_range(stored, start, part)
        yield part


def _runs(stored: Tensor) -> list[Callable[[], Tensor]] | None:
    """Return how to read the pieces of `stored` one after the other, if that gives its elements in their order."""
    if not isinstance(stored, LazyTensor):
        return [lambda: stored]
    position, ordered = 0, []
    for piece in sorted(stored.pieces, key=lambda piece: piece.chunk.offsets):
        run = flat_range_of(stored.shape, piece.chunk)
        if run is not None and run[0] == position:
            position = run[1]
            ordered.append(piece.values)
    return ordered if position == stored.numel() else None


def read_into(stored: Tensor, target: Tensor) -> None:
    """Fill `target`, whole or a DTensor of which this rank has a part, with what `stored` holds of it."""
    with torch.no_grad():
        if isinstance(target, DTensor):
            chunk = chunk_of_dtensor(target)
            if chunk is not None and chunk.numel:
                read_chunk(stored, chunk, target.to_local())
        elif target.numel():
            read_chunk(stored, full_chunk(stored.shape), target)
