"""Operations on shards that torch does otherwise than on one tensor, or not at all: as `aten` operation and handler."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from lightning_paral.compat.torch.dtensor import local_of, operation_handlers
from lightning_paral.errors import ConfigurationError
from lightning_paral.fsdp import whole_values
from lightning_paral.fsdp.parts import Part, mark_parts
from lightning_paral.fsdp.rows import as_whole, in_place_of, is_replicated, like, own_rows

Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
aten = torch.ops.aten


def _by_default(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Do what torch does."""
    handlers = operation_handlers()
    ours = handlers.pop(operation)
    try:
        return operation(*args, **kwargs)
    finally:
        handlers[operation] = ours


def _rows(tensor: Any) -> slice | None:
    return own_rows(tensor) if isinstance(tensor, DTensor) else None


def _draw_in_place(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Draw what one process would, of which a rank keeps its own rows; torch lets each rank draw its own (2.13)."""
    target, *others = args
    rows = _rows(target)
    if rows is None:
        return _by_default(operation, args, kwargs)
    whole = in_place_of(target, rows, filled=False)
    operation(whole, *map(as_whole, others), **kwargs)
    local_of(target).copy_(whole[rows])
    return target


def _draw_like(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    model, *others = args
    rows = _rows(model)
    if rows is None:
        return _by_default(operation, args, kwargs)
    whole = in_place_of(model, rows, filled=False)
    return like(model, operation(whole, *map(as_whole, others), **kwargs), rows)


def _draw_from(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Draw with probabilities that are sharded themselves. *Collective*."""
    model = args[0]
    rows = _rows(model)
    if rows is None:
        return _by_default(operation, args, kwargs)
    return like(model, operation(*map(as_whole, args), **kwargs), rows)


def _refuse_draw(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if isinstance(args[0], DTensor) and is_replicated(args[0]):
        return _by_default(operation, args, kwargs)
    raise ConfigurationError(
        f"{operation} on a sharded tensor (a DTensor) would draw other numbers than one process. Draw in the step, "
        "where what belongs to the root is whole, or draw with torch.rand_like or torch.randn_like and apply that."
    )


def _write_at_indices(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Write elements at given places: each rank those it holds. *Collective* where values or indices are sharded."""
    target, *others = args
    rows = _rows(target)
    if rows is None:
        return _by_default(operation, args, kwargs)
    whole = in_place_of(target, rows)
    operation(whole, *map(as_whole, others), **{key: as_whole(value) for key, value in kwargs.items()})
    local_of(target).copy_(whole[rows])
    return target


def _copy(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Copy a whole tensor, of which a rank needs its own rows."""
    target, source = args[:2]
    rows = _rows(target)
    if rows is None or isinstance(source, DTensor):
        return _by_default(operation, args, kwargs)
    local_of(target).copy_(source.expand(target.shape)[rows])
    return target


def _write_out(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    target = kwargs["out"]
    rows = _rows(target)
    if rows is None:
        return _by_default(operation, args, kwargs)
    whole = in_place_of(target, rows, filled=False)
    operation(*args, **{**kwargs, "out": whole})
    local_of(target).copy_(whole[rows])
    return target


def _view(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    result = _by_default(operation, args, kwargs)
    return mark_parts(result, operation, args, kwargs)


def _flatten(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """View a tensor in another shape; gathered where torch (2.13) cannot do it on uneven parts. *Collective* then."""
    try:
        return _by_default(operation, args, kwargs)
    except RuntimeError as error:
        if not any(words in str(error) for words in ("unevenly sharded", "sharded dimension")):
            raise
    origin, *others = args
    whole = origin.redistribute(placements=[Replicate()] * origin.device_mesh.ndim)
    return mark_parts(_by_default(operation, (whole, *others), kwargs), operation, args, kwargs)


_NAMES: dict[Handler, tuple[str, ...]] = {
    _draw_in_place: (
        "normal_.default", "uniform_.default", "bernoulli_.float", "bernoulli_.Tensor", "exponential_.default",
        "random_.default", "random_.from", "random_.to", "log_normal_.default", "cauchy_.default", "geometric_.default",
    ),
    _draw_like: (
        "randn_like.default", "rand_like.default", "randint_like.default", "randint_like.low_dtype", "bernoulli.p",
    ),
    _draw_from: ("bernoulli.default", "multinomial.default"),
    _refuse_draw: ("native_dropout.default",),
    _write_at_indices: (
        "index_put_.default", "index_fill_.int_Scalar", "index_fill_.int_Tensor", "index_add_.default",
        "index_copy_.default", "scatter_.src", "scatter_.value", "scatter_.reduce", "scatter_.value_reduce",
        "scatter_add_.default", "scatter_reduce_.two", "fill_diagonal_.default", "fill_.Tensor", "tril_.default",
        "triu_.default",
    ),
    _copy: ("copy_.default",),
    _write_out: ("eye.m_out", "eye.out"),
    _flatten: (
        "view.default", "_unsafe_view.default", "squeeze.default", "squeeze.dim", "squeeze.dims", "expand.default",
    ),
    _view: (
        "select.int", "slice.Tensor", "split.Tensor", "split_with_sizes.default", "diagonal.default", "unfold.default",
    ),
}  # fmt: skip


_WRITES = (_write_at_indices, _copy)


def handlers(in_step: Callable[[], bool]) -> dict[Any, Handler]:
    """Return the handlers by operation; `in_step` says whether a step is running."""
    found = whole_values.handlers(_by_default, in_step)
    takes_plain = whole_values.for_plain_targets(in_step)
    for handler, names in _NAMES.items():
        for name in names:
            operation, overload = name.split(".")
            packet = getattr(aten, operation)
            if overload in packet.overloads():
                found[getattr(packet, overload)] = takes_plain(handler) if handler in _WRITES else handler
    return found


def set_items(target: Any, index: Any, value: Any) -> None:
    """Do `target[index] = value` on a DTensor: each rank writes what it holds.

    *Collective* where `index` or `value` is sharded, unless `index` is a mask laid out like `target` and `value` a
    number.
    """
    rows = own_rows(target)
    if rows is None or (torch.is_grad_enabled() and target.requires_grad):
        torch.Tensor.__setitem__(target, index, value)
        return
    if isinstance(target, Part):
        target.refresh()
    local = local_of(target)
    with torch.no_grad():
        masked = isinstance(index, DTensor) and index.dtype == torch.bool and index.shape == target.shape
        if masked and index.placements == target.placements and not isinstance(value, Tensor):
            local[local_of(index)] = value
        else:
            whole = in_place_of(target, rows)
            whole[as_whole(index)] = as_whole(value)
            local.copy_(whole[rows])
    torch.autograd.graph.increment_version(target)
    if isinstance(target, Part):
        target.write_back()
