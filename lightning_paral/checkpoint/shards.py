"""A rank's shard of a tensor: the full tensor, an N-dimensional chunk (DTensor), or a flat range (ZeRO)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_paral.checkpoint.layout import Chunk, chunk_of_dtensor, chunks_of_flat_range, full_chunk, writes_chunk
from lightning_paral.compat.torch.tensors import WithoutMemory, tree_leaves, without_memory
from lightning_paral.errors import CheckpointError


@dataclass(frozen=True)
class LocalShard:
    """The elements of a tensor that this rank writes."""

    chunks: tuple[Chunk, ...]
    """The chunks of the tensor that contain these elements; empty if this rank writes none."""

    values: Callable[[], Tensor]
    """Returns the concatenated elements of the chunks: shape `[numel]`, contiguous, on any device."""


NO_SHARD = LocalShard((), lambda: torch.empty(0))
"""The shard of a rank that writes no elements."""

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
"""The operations that `FlatShard` supports."""


class FlatShard(WithoutMemory):
    """A tensor of which this rank has the flat range `[start, start + local_numel)`, or a chunk.

    It has the shape of the full tensor. Casts, copies and scaling apply to the local elements. Other operations raise a
    `CheckpointError`, because they would need the elements of other ranks.

    Args:
        shape: the shape of the full tensor.
        dtype: the dtype of the values.
        start: the index of the first local element in the flattened tensor.
        local_numel: the number of local elements; may be 0.
        read: returns the local elements, in shape `[local_numel]`. It is called on each use, so that offloaded values
            stay offloaded.
        read_order: a number that is equal for tensors stored together, and equal on all ranks. A save reads tensors in
            ascending order of this number, so that it reads each file on NVMe once.
        device: the device that the tensor reports; `None` means CPU.
        local_chunk: the chunk that this rank has, if its elements are no flat range. `start` then has no meaning.
    """

    start: int
    local_numel: int
    read: Callable[[], Tensor]
    read_order: int
    local_chunk: Chunk | None
    description = ""
    """What the tensor is, for errors."""

    @staticmethod
    def __new__(
        cls,
        shape: Sequence[int],
        dtype: torch.dtype,
        start: int,
        local_numel: int,
        read: Callable[[], Tensor],
        read_order: int = 0,
        device: torch.device | None = None,
        local_chunk: Chunk | None = None,
    ) -> "FlatShard":
        """Create the tensor without allocating memory."""
        shard = without_memory(cls, shape, dtype, device)
        shard.start = start
        shard.local_numel = local_numel
        shard.read = read
        shard.read_order = read_order
        shard.local_chunk = local_chunk
        return shard

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
        stop = self.start + self.local_numel
        local = f"[{self.start}, {stop})" if self.local_chunk is None else str(self.local_chunk.index)
        return f"FlatShard(shape={tuple(self.shape)}, dtype={self.dtype}, local={local})"

    def untyped_storage(self) -> Any:
        """Raise a `CheckpointError`."""
        refuse_export()

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self.description:
            refuse_export()
        values = partial(identity, self.read().detach().cpu().clone())
        place = (self.start, self.local_numel, values, self.read_order, None, self.local_chunk)
        return FlatShard, (tuple(self.shape), self.dtype, *place)

    def __deepcopy__(self, memo: Any) -> "FlatShard":
        copy: FlatShard = self.clone()  # type: ignore[assignment]
        return copy

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        shard = args[0]
        if func not in _ELEMENTWISE or not isinstance(shard, FlatShard) or any(_has_dims(other) for other in args[1:]):
            described = next((each.description for each in tree_leaves(args) if isinstance(each, FlatShard)), "")
            raise _cannot(str(func), described)
        kwargs = {key: value for key, value in kwargs.items() if key != "memory_format"}
        read, rest = shard.read, args[1:]
        dtype = kwargs.get("dtype") or func(torch.empty(1, dtype=shard.dtype), *rest, **kwargs).dtype
        result = FlatShard(
            shard.shape,
            dtype,
            shard.start,
            shard.local_numel,
            lambda: func(read(), *rest, **kwargs),
            shard.read_order,
            torch.device(kwargs.get("device") or shard.device),
            shard.local_chunk,
        )
        result.description = shard.description
        return result

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        """Raise a `CheckpointError`."""
        raise _cannot("numpy", self.description)

    def tolist(self) -> Any:
        """Raise a `CheckpointError`."""
        raise _cannot("tolist", self.description)

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        """The chunks of the tensor that contain this rank's elements, in the order of the elements."""
        if self.local_chunk is not None:
            return (self.local_chunk,) if self.local_numel else ()
        return tuple(chunks_of_flat_range(self.shape, self.start, self.start + self.local_numel))


def refuse_export(*_: Any) -> NoReturn:
    """Raise the error for user code that writes a shard to a file."""
    raise CheckpointError(
        "A tensor of which this rank holds only a shard was pickled, as by torch.save, or its memory was read, as by "
        "save_pretrained and safetensors. The file would contain only a part of it. Call "
        "`state = self.trainer.strategy.full_state_dict(part)` on all ranks, where `part` is the module or one of its "
        "submodules, and save `state` on one rank: torch.save(state, path) or part.save_pretrained(path, "
        "state_dict=state)."
    )


def _cannot(operation: str, described: str) -> CheckpointError:
    what = f"{described}, a tensor" if described else "a tensor"
    return CheckpointError(
        f"{operation} was called on {what} of which this rank holds only a shard. This is the case "
        "for weights and optimizer states in on_save_checkpoint under ZeRO, for parameters of other stages of a "
        "pipeline, and for optimizer states after a fit under ZeRO or FSDP. Casts, copies and scaling are supported, "
        "and entries of checkpoints can be added, renamed and deleted. Do other operations after loading, or under "
        "paral_ddp. To continue training by hand, create a new optimizer."
    )


def _has_dims(value: object) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0


def local_shard(value: Tensor) -> LocalShard:
    """Return the shard of `value` that this rank writes; `NO_SHARD` for all but the first replica of a DTensor.

    Args:
        value: a full tensor, or a `DTensor` or `FlatShard`.

    Raises:
        CheckpointError: a DTensor is neither sharded nor replicated, but, for example, a partial sum.
    """
    if isinstance(value, FlatShard):
        return LocalShard(value.chunks, value.read)
    if isinstance(value, DTensor):
        return _local_shard_of_dtensor(value)
    return LocalShard((full_chunk(value.shape),) if value.numel() else (), lambda: flat(value))


def identity(values: Tensor) -> Tensor:
    """Return `values`. Unlike a lambda, `partial(identity, values)` can be pickled."""
    return values


def flat(value: Tensor) -> Tensor:
    """Return `value` as a 1-dimensional contiguous tensor: a view if possible, otherwise a copy."""
    flattened = value.detach().resolve_conj().resolve_neg().contiguous().view(-1)
    # A tensor of one element is contiguous with any stride, but viewing it as bytes requires a stride of 1.
    return flattened if flattened.stride(0) == 1 else flattened.as_strided(flattened.shape, (1,))


def bytes_of(value: Tensor) -> memoryview:
    """Return the bytes of `value`, a tensor on the host. They are copied only if `value` is not contiguous."""
    data: Any = flat(value).view(torch.uint8).numpy()
    return memoryview(data)


def alone(value: Tensor) -> Tensor:
    """Return the elements of `value`, a tensor on the host that is not empty, flat and in a storage of just their size.

    What is pickled or saved of a tensor is its storage. They are copied only if `value` is not contiguous.
    """
    data: Any = bytes_of(value)
    return torch.frombuffer(data, dtype=value.dtype)


def is_sharded(value: Tensor) -> bool:
    """Return whether `value` is a tensor of which this rank may have only a shard."""
    return isinstance(value, FlatShard | DTensor)


def _local_shard_of_dtensor(value: DTensor) -> LocalShard:
    chunk = chunk_of_dtensor(value)
    if chunk is None or chunk.numel == 0 or not writes_chunk(value):
        return NO_SHARD
    return LocalShard((chunk,), lambda: flat(value.to_local()))
