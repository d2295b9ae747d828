"""Handlers for operations that torch refuses on shards, or runs with results different from those on plain tensors."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from lightning_paral.compat.torch.dtensor import local_of, operation_handlers
from lightning_paral.compat.torch.tensors import schema_of
from lightning_paral.engines.fsdp import gathered_ops
from lightning_paral.engines.fsdp.local_rows import as_full, full_from_chunk, is_replicated, own_chunk, shard_like
from lightning_paral.engines.fsdp.view_writes import GatheredView, mark_gathered
from lightning_paral.errors import ConfigurationError

Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
aten = torch.ops.aten


def _by_default(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the operation as torch does."""
    handlers = operation_handlers()
    ours = handlers.pop(operation)
    try:
        return operation(*args, **kwargs)
    finally:
        handlers[operation] = ours


def _chunk(tensor: Any) -> tuple[slice, ...] | None:
    return own_chunk(tensor) if isinstance(tensor, DTensor) else None


def _full_values(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {key: as_full(value) for key, value in kwargs.items()}


def _draw_in_place(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Draw as one process would, and keep this rank's chunk. In torch (2.13), each rank draws different numbers."""
    target, *others = args
    chunk = _chunk(target)
    if chunk is None:
        return _refuse_draw(operation, args, kwargs)
    full = full_from_chunk(target, chunk, filled=False)
    operation(full, *map(as_full, others), **_full_values(kwargs))
    local_of(target).copy_(full[chunk])
    return target


def _draw_like(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Draw a new tensor with the shape and layout of the first argument, as one process would."""
    template, *others = args
    chunk = _chunk(template)
    if chunk is None:
        return _refuse_draw(operation, args, kwargs)
    full = full_from_chunk(template, chunk, filled=False)
    return shard_like(template, operation(full, *map(as_full, others), **_full_values(kwargs)), chunk)


def _draw_from(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Draw from a distribution whose parameters, such as probabilities or means, are sharded. *Collective*."""
    template = next(value for value in (*args, *kwargs.values()) if isinstance(value, DTensor))
    chunk = own_chunk(template)
    if chunk is None:
        return _refuse_draw(operation, args, kwargs)
    full = operation(*map(as_full, args), **_full_values(kwargs))
    if full.shape == template.shape:
        return shard_like(template, full, chunk)
    mesh = template.device_mesh
    return DTensor.from_local(full, mesh, [Replicate()] * mesh.ndim, run_check=False)


def _refuse_draw(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if all(is_replicated(value) for value in (*args, *kwargs.values()) if isinstance(value, DTensor)):
        return _by_default(operation, args, kwargs)
    raise ConfigurationError(
        f"{operation} on a sharded tensor (a DTensor) would draw different numbers than one process. Draw in the step, "
        "where the root's parameters are unsharded, or compute the result from torch.rand_like or torch.randn_like."
    )


def _refuse_if_drawing(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Refuse operations that draw random numbers, unless a training flag or a probability of 0 disables drawing."""
    arguments = schema_of(operation).arguments
    given = {argument.name: value for argument, value in zip(arguments, args, strict=False)} | kwargs
    switches = {argument.name: argument.default_value for argument in arguments if argument.name in _SWITCHES}
    draws = all(given.get(name, default) != 0 for name, default in switches.items())
    return (_refuse_draw if draws else _by_default)(operation, args, kwargs)


_SWITCHES = ("train", "training", "dropout_p")


def _write_at_indices(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Write to given indices; each rank writes to its chunk. *Collective* if values or indices are sharded."""
    target, *others = args
    chunk = _chunk(target)
    if chunk is None:
        return _by_default(operation, args, kwargs)
    full = full_from_chunk(target, chunk)
    operation(full, *map(as_full, others), **_full_values(kwargs))
    local_of(target).copy_(full[chunk])
    return target


def _copy(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Copy a full tensor to a sharded tensor: each rank copies its chunk."""
    target, source = args[:2]
    chunk = _chunk(target)
    if chunk is None or isinstance(source, DTensor):
        return _by_default(operation, args, kwargs)
    local_of(target).copy_(source.expand(target.shape)[chunk])
    return target


def _write_out(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute the full result, and write this rank's chunk of it to `out`."""
    target = kwargs["out"]
    chunk = _chunk(target)
    if chunk is None:
        return _by_default(operation, args, kwargs)
    full = full_from_chunk(target, chunk, filled=False)
    operation(*map(as_full, args), **_full_values({**kwargs, "out": full}))
    local_of(target).copy_(full[chunk])
    return target


def _fill(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Fill a tensor with a number. If it is a partial sum, one rank gets the number and the others get 0.

    torch (2.13) gives each rank the number, so that the sum is a multiple of it.
    """
    target, value = args
    sums = [number for number, placement in enumerate(target.placements) if placement.is_partial("sum")]
    is_first = all(target.device_mesh.get_local_rank(number) == 0 for number in sums)
    return _by_default(operation, (target, value if is_first else 0), kwargs)


def _view(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    result = _by_default(operation, args, kwargs)
    return mark_gathered(result, operation, args, kwargs)


def _flatten(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """View a tensor with a different shape. *Collective* if torch (2.13) cannot do it on uneven shards."""
    try:
        return _by_default(operation, args, kwargs)
    except RuntimeError as error:
        if not any(words in str(error) for words in ("unevenly sharded", "sharded dimension")):
            raise
    origin, *others = args
    full = origin.redistribute(placements=[Replicate()] * origin.device_mesh.ndim)
    return mark_gathered(_by_default(operation, (full, *others), kwargs), operation, args, kwargs)


_OPERATIONS: dict[Handler, tuple[str, ...]] = {
    _draw_in_place: (
        "normal_.default", "uniform_.default", "bernoulli_.float", "bernoulli_.Tensor", "exponential_.default",
        "random_.default", "random_.from", "random_.to", "log_normal_.default", "cauchy_.default", "geometric_.default",
    ),
    _draw_like: (
        "randn_like.default", "rand_like.default", "randint_like.default", "randint_like.low_dtype", "bernoulli.p",
        "randn_like.generator", "rand_like.generator", "randint_like.generator", "randint_like.low_generator_dtype",
        "cauchy.default", "exponential.default", "geometric.default", "log_normal.default", "normal_functional.default",
        "random.default", "random.from", "random.to", "uniform.default",
    ),
    _draw_from: (
        "bernoulli.default", "bernoulli.Tensor", "multinomial.default", "poisson.default", "binomial.default",
        "normal.Tensor_float", "normal.float_Tensor", "normal.Tensor_Tensor", "_standard_gamma.default",
        "_sample_dirichlet.default", "randint_like.Tensor", "randint_like.Tensor_generator",
    ),
    _refuse_if_drawing: (
        "native_dropout.default", "_fused_dropout.default", "rrelu_with_noise.default", "rrelu_with_noise_.default",
        "rrelu_with_noise_functional.default", "rrelu_with_noise.out", "native_dropout.out", "_fused_dropout.out",
        "_scaled_dot_product_flash_attention.default",
        "_scaled_dot_product_efficient_attention.default", "_scaled_dot_product_cudnn_attention.default",
        "_scaled_dot_product_flash_attention_for_cpu.default",
        "_scaled_dot_product_fused_attention_overrideable.default",
    ),
    _write_at_indices: (
        "index_put_.default", "index_fill_.int_Scalar", "index_fill_.int_Tensor", "index_add_.default",
        "index_copy_.default", "scatter_.src", "scatter_.value", "scatter_.reduce", "scatter_.value_reduce",
        "scatter_add_.default", "scatter_reduce_.two", "fill_diagonal_.default", "fill_.Tensor", "tril_.default",
        "triu_.default",
    ),
    _copy: ("copy_.default",),
    _fill: ("fill_.Scalar",),
    _write_out: (
        "eye.m_out", "eye.out", "bernoulli.out", "bernoulli.Tensor_out", "bernoulli.float_out", "cauchy.out",
        "exponential.out", "geometric.out", "log_normal.out", "normal.out", "normal.float_float_out",
        "normal.Tensor_float_out", "normal.float_Tensor_out", "normal.Tensor_Tensor_out", "uniform.out", "random.out",
        "random.from_out", "random.to_out", "poisson.out", "binomial.out", "multinomial.out", "_standard_gamma.out",
        "rand.out", "rand.generator_out", "randn.out", "randn.generator_out", "randint.out", "randint.generator_out",
        "randint.low_out", "randint.low_generator_out", "randperm.out", "randperm.generator_out",
    ),
    _flatten: (
        "view.default", "_unsafe_view.default", "squeeze.default", "squeeze.dim", "squeeze.dims", "expand.default",
    ),
    _view: (
        "select.int", "slice.Tensor", "split.Tensor", "split_with_sizes.default", "diagonal.default", "unfold.default",
    ),
}  # fmt: skip


_WRITES = (_write_at_indices, _copy)


def handlers(in_step: Callable[[], bool]) -> dict[Any, Handler]:
    """Return the handlers by operation; `in_step` returns whether a step is running."""
    found = gathered_ops.handlers(_by_default, in_step)
    takes_plain = gathered_ops.accept_plain_targets(in_step)
    for handler, names in _OPERATIONS.items():
        for name in names:
            operation, overload = name.split(".")
            packet = getattr(aten, operation)
            if overload in packet.overloads():
                found[getattr(packet, overload)] = takes_plain(handler) if handler in _WRITES else handler
    return found


def set_items(target: Any, index: Any, value: Any) -> None:
    """Run `target[index] = value` on a DTensor: each rank writes to its shard.

    *Collective* if `index` or `value` is sharded, unless `index` is a mask laid out like `target` and `value` a number.
    """
    chunk = own_chunk(target)
    if chunk is None or (torch.is_grad_enabled() and target.requires_grad):
        torch.Tensor.__setitem__(target, index, value)
        return
    if isinstance(target, GatheredView):
        target.refresh()
    local = local_of(target)
    with torch.no_grad():
        masked = isinstance(index, DTensor) and index.dtype == torch.bool and index.shape == target.shape
        if masked and index.placements == target.placements and not isinstance(value, Tensor):
            local[local_of(index)] = value
        else:
            full = full_from_chunk(target, chunk)
            full[as_full(index)] = as_full(value)
            local.copy_(full[chunk])
    torch.autograd.graph.increment_version(target)
    if isinstance(target, GatheredView):
        target.write_back()
