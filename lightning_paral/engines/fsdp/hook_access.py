"""Let the code of hooks use sharded tensors (DTensors) as if they were full.

One rule: an operation that acts on each element by itself, on tensors that are sharded alike, runs on the shards. Every
other one runs on full tensors, as in one process, and each rank keeps its chunk of what it writes, and of gradients.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import cache, partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from lightning_paral.checkpoint.layout import Chunk, chunk_of_dtensor, dtensor_like
from lightning_paral.checkpoint.shards import refuse_export
from lightning_paral.compat.torch.autograd import is_in_transform, version_of
from lightning_paral.compat.torch.dtensor import local_of
from lightning_paral.compat.torch.patches import replace_attributes
from lightning_paral.compat.torch.tensors import (
    FOREACH,
    TorchDispatchMode,
    identity_of,
    packet_of,
    schema_of,
    tree_leaves,
    tree_map_only,
    use_count,
)
from lightning_paral.engines.fsdp.refusals import check_assigned
from lightning_paral.errors import ConfigurationError

aten = torch.ops.aten

_ELEMENTWISE = {
    aten.copy_, aten.fill_, aten.zero_, aten.masked_fill, aten.masked_fill_, aten._to_copy, aten.detach, aten.alias,
    aten.zeros_like, aten.ones_like, aten.empty_like, aten.full_like, aten.detach_,
}  # fmt: skip
"""Operations on each element that torch does not tag as pointwise."""
_TO_PYTHON = {"numpy", "tolist", "__array__"}
"""Methods that convert a tensor to Python or NumPy, below the dispatcher."""
_VIEWS = {Tensor.data, Tensor.T, Tensor.mT, Tensor.H, Tensor.mH, Tensor.real, Tensor.imag}
"""Attributes of tensors that are operations."""


class _View(NamedTuple):
    """A full copy of a sharded tensor, of which user code has views."""

    tensor: Any
    full: Tensor


class HookAccess:
    """Lets code outside of steps use DTensors as full tensors, until `remove` is called. Most uses are *collective*.

    - What is computed from the elements of several ranks, such as `float(p.norm())`, is a full, plain tensor.
    - Random operations draw the numbers that one process would draw.
    - Views such as `p[0]` are views of a full copy. What is written to them is written to the shards when a step or an
      optimizer begins, or `to_local` is called; from then on they no longer belong to it.
    - Assigning a full tensor to `data` or `grad` copies this rank's chunk.
    - Writing a DTensor to a file, which would have only this rank's part, is an error.

    Args:
        params: the sharded parameters by name.
        before_use: is called with the DTensors that an operation reads, and those that it changes.
    """

    def __init__(
        self,
        params: Callable[[], Iterable[tuple[str, Tensor]]],
        before_use: Callable[[Sequence[Any], Sequence[Any]], None] = lambda read, changed: None,
    ) -> None:
        self._params = params
        self._before_use = before_use
        self.views: dict[Any, _View] = {}
        """The full copies that views share memory with. `flush` has nothing to do without them."""
        self._mode = _Mode(self)
        own: dict[str, Any] = {
            "__torch_function__": classmethod(self._torch_function()),
            "__deepcopy__": _deepcopy,
            "__reduce_ex__": refuse_export,
            "untyped_storage": refuse_export,
        }
        own |= {name: self._reading(name, self._write_views) for name in ("full_tensor", "redistribute")}
        own["to_local"] = self._reading("to_local", self.flush)  # some ranks alone may call it, and write to it
        self._undo = replace_attributes(DTensor, own)

    def remove(self) -> None:
        """Write what is left to the shards, and restore the operations of DTensors."""
        try:
            self.flush()
        finally:
            self._undo()

    def flush(self) -> None:
        """Write what was written to views to the shards. From now on, the views no longer belong to them."""
        if self.views:
            self._write_views()
            self.views.clear()

    def _write_views(self) -> None:
        """Write what was written to views to the shards."""
        for view in self.views.values():
            keep_chunk(view.tensor, view.full)

    def _reading(self, name: str, write_views: Callable[[], None]) -> Callable[..., Any]:
        method = getattr(DTensor, name)

        def call(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            write_views()
            self._before_use((tensor,), ())
            return method(tensor, *args, **kwargs)

        return call

    # Functions of torch, and the operations that they consist of

    def _torch_function(self) -> Callable[..., Any]:
        def call(_: Any, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
            if _is_plain(function, args):
                with torch.DisableTorchFunctionSubclass():
                    return function(*args)
            return self._call(function, args, kwargs or {})

        return call

    def _call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = function.__name__
        attribute = getattr(function, "__self__", None)
        with torch.DisableTorchFunctionSubclass():
            if name == "requires_grad_" or attribute is Tensor.requires_grad:
                self._before_use((), args[:1])
                return function(*args, **kwargs)
            if name == "__set__" and attribute in (Tensor.data, Tensor.grad):
                return self._assign(function, *args)
            if name in _TO_PYTHON:
                return _to_python(function, *args, **kwargs)
            known = set(self.views)
            with suppress(_NeedsGradientError):
                with self._mode:
                    result = function(*args, **kwargs)
                if len(self.views) > len(known):
                    del args, kwargs
                    self._drop_unused(known)
                return result
        return self._differentiate(function, args, kwargs)

    def _differentiate(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a function on full copies, whose gradients are averaged over the ranks."""
        versions: dict[Tensor, int] = {}

        def full_of(tensor: Any) -> Tensor:
            full: Tensor = _Gather.apply(tensor)  # type: ignore[no-untyped-call]
            versions[full] = version_of(full)
            return full

        result = function(*tree_map_only(DTensor, full_of, args), **tree_map_only(DTensor, full_of, kwargs))
        if any(version_of(full) != version for full, version in versions.items()):
            raise ConfigurationError(
                f"{function.__name__} writes to a sharded tensor (DTensor) that is differentiated. Use an operation "
                "that returns a new tensor, or torch.no_grad()."
            )
        return result

    def _drop_unused(self, known: set[Any]) -> None:
        """Drop copies of which nobody has views, among those that a call made for itself."""
        for key in [key for key in self.views if key not in known]:
            if use_count(self.views[key].full) == 2:  # the copy itself, and the storage object that is asked
                view = self.views.pop(key)
                keep_chunk(view.tensor, view.full)

    @torch.no_grad()
    def _assign(self, assign: Callable[..., None], target: Any, value: Tensor) -> None:
        is_data = assign.__self__ is Tensor.data  # type: ignore[attr-defined]
        if is_data and isinstance(target, DTensor):
            name = next((name for name, param in self._params() if param is target), "A sharded tensor")
            check_assigned(name, target, value, [param for _, param in self._params() if param is not target])
            with self._mode:
                target.copy_(value.clone(memory_format=torch.contiguous_format))  # which may be a view of the target
        elif isinstance(value, DTensor) or value.shape != target.shape:
            assign(target, value)
        else:
            assign(target, shard_like(target, value))

    def run(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation of the dispatcher by the rule of this module."""
        packet = packet_of(operation)
        name = packet.__name__
        if name.startswith(FOREACH) and len(args[0]) > 1:  # so that few full tensors exist at a time
            single = [self.run(operation, _at(args, number), kwargs) for number in range(len(args[0]))]
            return [one for [one] in single] if single[0] is not None else None
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        sharded = [each for each in tensors if isinstance(each, DTensor)]
        if not sharded or packet in (aten.detach, aten.alias, aten.detach_):
            return operation(*args, **kwargs)
        if name.startswith("new_"):  # reads no values
            is_like = torch.Size(args[1]) == args[0].shape
            return operation(args[0] if is_like else local_of(args[0]), *args[1:], **kwargs)
        if self._needs_gradient(operation, tensors):
            raise _NeedsGradientError
        written = [each for each in _written(operation, args, kwargs) if isinstance(each, DTensor)]
        self._before_use(sharded, written)
        if self._acts_on_shards(operation, tensors):
            return operation(*args, **kwargs)
        if not written and _differentiates(tensors):  # in a transform of torch.func
            return operation(*args, **kwargs)  # which is torch's error
        if packet is aten.linalg_vector_norm and _can_be_joined(*args[:2]):
            self._write_views()
            return operation(*args, **kwargs).full_tensor()
        return self._run_on_full(operation, args, kwargs)

    def _needs_gradient(self, operation: Any, tensors: list[Tensor]) -> bool:
        """Return whether an operation is differentiated whose gradients would not be sharded as the tensors are."""
        if _names_of_written(operation) or not _differentiates(tensors) or is_in_transform():
            return False
        has_plain = any(each.requires_grad for each in tensors if not isinstance(each, DTensor))
        return has_plain or not self._acts_on_shards(operation, tensors)

    def _acts_on_shards(self, operation: Any, tensors: list[Tensor]) -> bool:
        """Return whether an operation acts on each element of DTensors that are sharded alike, without views."""
        if not _is_elementwise(operation):
            return False
        sharded: list[Any] = [each for each in tensors if isinstance(each, DTensor)]
        layouts = {(each.device_mesh, each.placements, each.shape) for each in sharded}
        return (
            len(layouts) == 1
            and all(isinstance(each, DTensor) or each.dim() == 0 for each in tensors)
            and not any(placement.is_partial() for placement in sharded[0].placements)
            and not (self.views and any(_key(each) in self.views for each in sharded))
        )

    def _run_on_full(self, operation: Any, args: Any, kwargs: Any) -> Any:
        schema = schema_of(operation)
        names, writes = _argument_names(operation), _names_of_written(operation)
        given = dict(zip(names, args, strict=False)) | kwargs
        viewed = {each.name for each in schema.arguments if each.alias_info is not None} - writes
        fulls: dict[int, Tensor] = {}

        def full_of(name: str, tensor: Any) -> Tensor:
            if id(tensor) not in fulls:
                fulls[id(tensor)] = self._full(tensor, name in viewed)
            return fulls[id(tensor)]

        order = [name for name in names if name in writes] + [name for name in names if name not in writes]
        values = {name: tree_map_only(DTensor, partial(full_of, name), given[name]) for name in order if name in given}
        result = operation(*(values[name] for name in names[: len(args)]), **{name: values[name] for name in kwargs})
        written = _written(operation, args, kwargs)
        for each in written:
            if isinstance(each, DTensor):
                keep_chunk(each, fulls[id(each)])
        if schema.returns and all(map(_is_write, schema.returns)):
            return written[0] if len(schema.returns) == 1 else tuple(written)
        return result

    def _full(self, tensor: Any, keep: bool) -> Tensor:
        key = _key(tensor)
        if key in self.views:
            return self.views[key].full
        if keep:  # what is written to a view is written to the shard
            self._before_use((), (tensor,))
        full = as_full(tensor)
        if keep:
            self.views[key] = _View(tensor.detach(), full)
        return full


def _written(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Return the arguments that an operation writes to."""
    names = _names_of_written(operation)
    values = [*zip(_argument_names(operation), args, strict=False), *kwargs.items()] if names else []
    return [each for name, value in values if name in names for each in tree_leaves(value)]


@cache
def _argument_names(operation: Any) -> tuple[str, ...]:
    return tuple(argument.name for argument in schema_of(operation).arguments)


@cache
def _names_of_written(operation: Any) -> frozenset[str]:
    return frozenset(argument.name for argument in schema_of(operation).arguments if _is_write(argument))


class _Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, access: HookAccess) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._access = access

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._access.run(operation, args, kwargs or {})


class _NeedsGradientError(Exception):
    """An operation on shards has to be differentiated that does not act on each element by itself."""


class _Gather(torch.autograd.Function):
    """Gathers a DTensor, whose gradient is averaged over the ranks, as their losses are. *Collective*."""

    @staticmethod
    def forward(ctx: Any, tensor: Any) -> Tensor:
        ctx.tensor = tensor.detach()
        return as_full(ctx.tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        mesh = ctx.tensor.device_mesh
        gradient = (gradient / mesh.size()).contiguous()
        for group in mesh.get_all_groups():
            dist.all_reduce(gradient, group=group)
        if gradient.device.type != "cpu":
            torch.accelerator.synchronize()  # FSDP2 may be reducing another gradient of the parameter
        return shard_like(ctx.tensor, gradient)


@cache
def _is_elementwise(operation: Any) -> bool:
    """Return whether an operation, or a `_foreach_` operation, acts on each element by itself."""
    packet = packet_of(operation)
    if packet.__name__.startswith(FOREACH):
        single = getattr(aten, packet.__name__.removeprefix(FOREACH), None)
        names = [] if single is None else single.overloads()
        # The default of `add` and `sub` is one for compilers, without tags.
        known = [name for name in ("Tensor", "Scalar", "default") if name in names][:1] or names
        return any(_is_elementwise(getattr(single, name)) for name in known)
    is_pointwise = torch.Tag.pointwise in operation.tags and torch.Tag.nondeterministic_seeded not in operation.tags
    return packet in _ELEMENTWISE or (is_pointwise and packet is not aten.equal)  # which returns one number


def _is_write(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _differentiates(tensors: Iterable[Tensor]) -> bool:
    return torch.is_grad_enabled() and any(each.requires_grad for each in tensors)


def _can_be_joined(tensor: Tensor, order: float = 2) -> bool:
    """Return whether the norm of a tensor follows from the norms of its shards, up to rounding in fp32."""
    return 0 < order < math.inf and torch.finfo(tensor.dtype).bits > 16


def _at(args: tuple[Any, ...], number: int) -> tuple[Any, ...]:
    """Return the arguments of a `_foreach_` operation for the tensor of this number alone."""

    def at(arg: Any) -> Any:
        if isinstance(arg, Tensor) and arg.dim() == 1:  # a tensor of a number for each
            return arg[number : number + 1]
        return [arg[number]] if isinstance(arg, list | tuple) and len(arg) == len(args[0]) else arg

    return tuple(map(at, args))


def _is_plain(function: Any, args: tuple[Any, ...]) -> bool:
    """Return whether `function` reads or sets an attribute as of any tensor. A step does so thousands of times."""
    if function.__name__ == "__get__":
        return function.__self__ not in _VIEWS
    if function.__name__ == "__set__":
        return args[1] is None or (function.__self__ is Tensor.grad and isinstance(args[1], DTensor))
    return False


def _to_python(function: Callable[..., Any], tensor: Any, *args: Any, **kwargs: Any) -> Any:
    """Convert a full tensor to Python or NumPy. *Collective*."""
    result = function(tensor.detach().full_tensor(), *args, **kwargs)
    if hasattr(result, "flags"):
        result.flags.writeable = False  # writes to the array would be lost, because it is a copy
    return result


def _deepcopy(tensor: Any, memo: dict[int, Any]) -> Any:
    """Deep-copy a DTensor, as in `copy.deepcopy(self.state_dict())`, which fails in torch 2.13."""
    if id(tensor) not in memo:
        copied = tensor.detach().clone()
        is_parameter, trained = isinstance(tensor, Parameter), tensor.requires_grad
        memo[id(tensor)] = Parameter(copied, trained) if is_parameter else copied.requires_grad_(trained)
    return memo[id(tensor)]


def _key(tensor: Any) -> Any:
    local = local_of(tensor)
    return identity_of(local.untyped_storage()), local.storage_offset(), tensor.shape


# Full values of DTensors, and the chunk of them that this rank holds


def _own_chunk(tensor: Any) -> tuple[slice, ...]:
    """Return the chunk that this rank holds of a DTensor, as an index into the full tensor."""
    chunk: Any = chunk_of_dtensor(tensor)  # `None` for ranks that are not in the mesh
    # If tensor parallelism leaves no columns to a rank, FSDP2 also gives it no rows (torch 2.13).
    return chunk.index if chunk.numel else Chunk(chunk.offsets, tuple(local_of(tensor).shape)).index


@torch.no_grad()
def keep_chunk(tensor: Any, full: Tensor) -> None:
    """Copy this rank's chunk of `full` to `tensor`, a DTensor. No collective."""
    local = local_of(tensor)
    if local.numel():
        local.copy_(full[_own_chunk(tensor)])


def shard_like(tensor: Any, full: Tensor) -> Tensor:
    """Return `full` as a DTensor with the layout of `tensor`. No collective."""
    return dtensor_like(full[_own_chunk(tensor)].clone(), tensor)


@torch.no_grad()
def as_full(tensor: Any) -> Tensor:
    """Return a full copy of a DTensor with the same strides: random numbers are drawn in memory order. *Collective*."""
    full: Tensor = tensor.detach().full_tensor()  # otherwise an error in torch 2.11
    if 0 in tensor.stride() or tensor.numel() == 0:
        return full.clone()
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=full.dtype, device=full.device).copy_(full)
