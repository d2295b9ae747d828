"""What a rank holds of a tensor: all of it, a box (DTensor), or a run of its flattened elements (ZeRO)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_paral.checkpoint.layout import Chunk, chunks_of_flat_range, full_chunk
from lightning_paral.compat.torch.dtensor_layout import compute_local_shape_and_global_offset
from lightning_paral.compat.torch.wrapper_tensors import without_memory
from lightning_paral.errors import CheckpointError


@dataclass(frozen=True)
class Part:
    """What one rank writes of a tensor."""

    chunks: tuple[Chunk, ...]
    """Where it lies in the tensor; none if this rank writes nothing of it."""

    values: Callable[[], Tensor]
    """Returns the elements of the boxes, one after the other: 1-dimensional, contiguous, on any device."""

    place: int = 0
    """The `place` of a FlatShard."""


NOTHING = Part((), lambda: torch.empty(0))

_aten = torch.ops.aten
_ELEMENTWISE = {
    _aten.detach.default,
    _aten.alias.default,
    _aten.clone.default,
    _aten._to_copy.default,
    _aten.mul.Tensor,
    _aten.mul.Scalar,
    _aten.div.Tensor,
    _aten.neg.default,
}


class FlatShard(Tensor):
    """A tensor of which this rank holds the run `[start, start + numel)` of its flattened elements.

    It has the true shape. Casts, copies and scaling work on the run; anything else would need the other ranks.

    Args:
        shape: of the whole tensor.
        dtype: of the values.
        start: index of the first element held.
        numel: how many are held; may be 0.
        read: returns them, 1-dimensional; called when they are needed, so that what is offloaded stays so until then.
        place: on all ranks the same for tensors that lie together, and are cheap to read one after the other.
    """

    start: int
    held: int
    read: Callable[[], Tensor]
    place: int

    @staticmethod
    def __new__(
        cls,
        shape: Sequence[int],
        dtype: torch.dtype,
        start: int,
        numel: int,
        read: Callable[[], Tensor],
        place: int = 0,
    ) -> "FlatShard":
        """Make the tensor without memory of its own."""
        run = without_memory(cls, shape, dtype)
        run.start = start
        run.held = numel
        run.read = read
        run.place = place
        return run

    def __init__(self, *args: Any) -> None:
        super().__init__()

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
        held = f"[{self.start}, {self.start + self.held})"
        return f"FlatShard(shape={tuple(self.shape)}, dtype={self.dtype}, held={held})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        values = partial(identity, self.read().detach().cpu().clone())
        return FlatShard, (tuple(self.shape), self.dtype, self.start, self.held, values, self.place)

    def __deepcopy__(self, memo: Any) -> "FlatShard":
        copy: FlatShard = self.clone()  # type: ignore[assignment]
        return copy

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        run = args[0]
        if func not in _ELEMENTWISE or not isinstance(run, FlatShard) or any(_has_dims(other) for other in args[1:]):
            raise CheckpointError(
                f"{func} was called on a tensor of which this rank holds a part only, as is the case for weights and "
                "optimizer states under ZeRO in on_save_checkpoint, and for optimizer states after a fit under ZeRO or "
                "FSDP. Casts, copies and scaling work, and entries of checkpoints can be added, renamed and deleted. "
                "Do anything else after loading, or under paral_ddp; to train on by hand, make a new optimizer."
            )
        kwargs = {key: value for key, value in kwargs.items() if key != "memory_format"}
        read, rest = run.read, args[1:]
        dtype = kwargs.get("dtype") or func(torch.empty(1, dtype=run.dtype), *rest, **kwargs).dtype
        return FlatShard(run.shape, dtype, run.start, run.held, lambda: func(read(), *rest, **kwargs), run.place)


def _has_dims(value: object) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0


def part_of(value: Tensor) -> Part:
    """Return what this rank holds of `value`; nothing for the second and later replicas of a DTensor."""
    if isinstance(value, FlatShard):
        return Part(
            tuple(chunks_of_flat_range(value.shape, value.start, value.start + value.held)), value.read, value.place
        )
    if isinstance(value, DTensor):
        return _part_of_dtensor(value)
    return Part((full_chunk(value.shape),) if value.numel() else (), lambda: flat(value))


def run_of(value: Tensor, start: int, stop: int) -> Part:
    """Return elements `[start, stop)` of a whole tensor."""
    start, stop = min(start, value.numel()), min(stop, value.numel())
    return Part(tuple(chunks_of_flat_range(value.shape, start, stop)), lambda: flat(value)[start:stop])


def identity(values: Tensor) -> Tensor:
    """Return `values`: for parts whose values are at hand."""
    return values


def flat(value: Tensor) -> Tensor:
    """Return `value` as 1-dimensional and contiguous: a view where possible."""
    run = value.detach().resolve_conj().resolve_neg().contiguous().view(-1)
    # A tensor of one element is contiguous with any stride, but viewing it as bytes requires a stride of 1.
    return run if run.stride(0) == 1 else run.as_strided(run.shape, (1,))


def bytes_of(value: Tensor) -> memoryview:
    """Return the memory of `value`, a tensor on the host, or of a copy if it is not contiguous."""
    data: Any = flat(value).view(torch.uint8).numpy()
    return memoryview(data)


def is_sharded(value: Tensor) -> bool:
    """Whether this rank may hold a part only."""
    return isinstance(value, FlatShard | DTensor)


def chunk_of_dtensor(value: DTensor) -> Chunk | None:
    """Return where this rank's local tensor lies; `None` if it is outside the mesh.

    Raises:
        CheckpointError: a placement in which the local tensor is no box, such as a partial sum.
    """
    if value.device_mesh.get_coordinate() is None:
        return None
    if any(not (placement.is_shard() or placement.is_replicate()) for placement in value.placements):
        raise CheckpointError(f"A DTensor with placements {value.placements} cannot be saved: redistribute it first.")
    sizes, offsets = compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)
    return Chunk(tuple(offsets), tuple(sizes))


def _part_of_dtensor(value: DTensor) -> Part:
    chunk = chunk_of_dtensor(value)
    coordinate = value.device_mesh.get_coordinate()
    if chunk is None or coordinate is None or chunk.numel == 0:
        return NOTHING
    if any(index for index, placement in zip(coordinate, value.placements, strict=True) if placement.is_replicate()):
        return NOTHING
    return Part((chunk,), lambda: flat(value.to_local()))
