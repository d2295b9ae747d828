"""Operations for which DTensors are gathered first, because torch refuses them, or runs them on one rank's shard.

Code written for one process mixes DTensors with plain tensors, as in `average.lerp_(parameter, 0.1)`, and reads
numbers, as in `float(parameter.norm())`. Outside steps, such code gives one process's results, and is *collective*.
Inside a step, plain tensors may differ between ranks, so mixing them with DTensors remains an error.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_paral.compat.torch.dtensor import has_strategy, local_of
from lightning_paral.compat.torch.tensors import schema_of
from lightning_paral.engines.fsdp.local_rows import (
    as_full,
    full_from_chunk,
    has_empty_shard,
    is_replicated,
    own_chunk,
    shard_like,
)

Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
aten = torch.ops.aten

# The in-place operations among these are elementwise, so each rank can compute its own chunk.
MIXED = (
    "add", "add_", "sub", "sub_", "rsub", "mul", "mul_", "div", "div_", "pow", "pow_", "lerp", "lerp_",
    "addcmul", "addcmul_", "addcdiv", "addcdiv_", "maximum", "minimum", "fmax", "fmin", "clamp", "clamp_",
    "clamp_min", "clamp_min_", "clamp_max", "clamp_max_", "copysign", "copysign_", "where", "masked_fill",
    "masked_fill_", "eq", "ne", "gt", "ge", "lt", "le", "logical_and", "logical_and_", "logical_or", "logical_or_",
    "bitwise_and", "bitwise_or", "dot", "mv", "mm", "bmm", "addmm", "cat", "stack", "mse_loss",
    "_foreach_add", "_foreach_add_", "_foreach_sub", "_foreach_sub_", "_foreach_mul", "_foreach_mul_", "_foreach_div",
    "_foreach_div_", "_foreach_lerp", "_foreach_lerp_", "_foreach_copy_", "_foreach_maximum_", "_foreach_minimum_",
    "_foreach_addcmul_", "_foreach_addcdiv_", "atan2_", "hypot_", "fmod_", "remainder_", "xlogy_", "floor_divide_",
    "smooth_l1_loss", "huber_loss", "baddbmm", "_cdist_forward",
)  # fmt: skip
"""Operations that run on full tensors when they are given both DTensors and plain tensors."""

GATHERED = (
    "equal.default", "allclose.default", "histc.default", "_unique2.default", "nonzero.default", "index.Tensor",
    "masked_select.default", "gather.default", "index_select.default", "_is_all_true.default", "_is_any_true.default",
    "unique_consecutive.default", "bucketize.Tensor", "searchsorted.Tensor", "take.default",
)  # fmt: skip
"""Operations that torch (2.13) refuses for DTensors, or runs on one shard. Outside steps, they run on full tensors."""

WRONG_ON_SHARDS = (
    "argmax.default", "argmin.default", "max.dim", "min.dim", "mse_loss.default", "smooth_l1_loss.default",
    "huber_loss.default", "binary_cross_entropy.default", "binary_cross_entropy_with_logits.default",
    "soft_margin_loss.default",
)  # fmt: skip
"""Operations with wrong results on shards: indices relative to a shard (torch 2.11), means of uneven shards (2.13)."""

BACKWARD_OF_MEANS = (
    "mse_loss_backward.default", "smooth_l1_loss_backward.default", "huber_loss_backward.default",
    "binary_cross_entropy_backward.default", "soft_margin_loss_backward.default",
)  # fmt: skip
"""Gradients of means that torch (2.13) divides by the number of elements of the shard instead of the full tensor."""

CUMULATIVE = ("cumsum.default", "cumprod.default", "logcumsumexp.default")
"""Operations that torch (2.13) runs on each shard separately if their dimension is given as a negative number."""

SUPPORTED_LATER = (
    "median.default", "median.dim", "nanmedian.default", "nanmedian.dim", "mode.default", "kthvalue.default",
    "cummax.default", "cummin.default", "cumprod.default", "logcumsumexp.default", "nansum.default", "any.dims",
    "var_mean.correction", "flip.default", "roll.default", "isfinite.default", "ne.Tensor", "div.Scalar_mode",
    "clip.Tensor", "leaky_relu.default", "elu.default", "hardtanh.default", "softplus.default", "mish.default",
    "_linalg_det.default", "_linalg_slogdet.default", "_linalg_solve_ex.default", "linalg_inv_ex.default",
    "linalg_cholesky_ex.default", "linalg_matrix_exp.default", "linalg_eig.default", "linalg_cross.default",
    "linalg_pinv.atol_rtol_tensor", "_fft_r2c.default", "_fft_c2c.default", "_fft_c2r.default", "rot90.default",
    "index_fill.int_Scalar", "index_fill.int_Tensor", "std_mean.correction",
)  # fmt: skip
"""Operations that DTensor supports only from torch 2.12 or 2.13 on. Before, they run on full tensors outside steps."""

WITHOUT_IDENTITY = (
    "max.default", "min.default", "amax.default", "amin.default", "aminmax.default", "linalg_vector_norm.default",
    "_foreach_norm.Scalar", "_foreach_max.default",
)  # fmt: skip
"""Reductions that fail on empty shards. If a rank has one, they run on full tensors."""


def read_number(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the number in a one-element tensor; torch (2.13) would return this rank's part of a sum or norm."""
    return operation(args[0].full_tensor())


def on_full(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the operation on full tensors. *Collective*."""
    return operation(*map(as_full, args), **{key: as_full(value) for key, value in kwargs.items()})


def _shard_result_like_second(by_default: Handler) -> Handler:
    """Return a handler that runs operations on full tensors, and shards the result like their second argument."""

    def handle(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        template = args[1]
        chunk = own_chunk(template) if isinstance(template, DTensor) else None
        if chunk is None and isinstance(template, DTensor):
            return by_default(operation, args, kwargs)
        full = on_full(operation, args, kwargs)
        return full if chunk is None else shard_like(template, full, chunk)

    return handle


def _make_dim_positive(otherwise: Handler) -> Handler:
    """Return a handler that replaces a negative dimension by the equivalent positive one, and calls `otherwise`."""

    def handle(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensor, dim, *others = args
        num_dims = max(tensor.dim(), 1)
        return otherwise(operation, (tensor, dim + num_dims if -num_dims <= dim < 0 else dim, *others), kwargs)

    return handle


def _unbind(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Unbind with `select`, so that writes to the results reach the shards."""
    tensor, dim = args[0], args[1] if len(args) > 1 else kwargs.get("dim", 0)
    return [tensor.select(dim, number) for number in range(tensor.shape[dim])]


def handle_empty_shards(otherwise: Handler) -> Handler:
    """Return a handler that runs a reduction on full tensors if any rank has an empty shard, on which it would fail."""

    def handle(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        has_identity = "norm" in str(operation) and abs(args[1] if len(args) > 1 else 2) != torch.inf
        some_rank_is_empty = any(has_empty_shard(tensor) for tensor in _tensors(args) if isinstance(tensor, DTensor))
        chosen = on_full if some_rank_is_empty and not has_identity else otherwise
        return chosen(operation, args, kwargs)

    return handle


def accept_plain_targets(in_step: Callable[[], bool]) -> Callable[[Handler], Handler]:
    """Return a decorator for handlers of in-place operations: outside steps, the target may be a plain tensor."""

    def around(handler: Handler) -> Handler:
        def handle(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if isinstance(args[0], DTensor) or in_step():
                return handler(operation, args, kwargs)
            target, *others = args
            return operation(target, *map(as_full, others), **{key: as_full(value) for key, value in kwargs.items()})

        return handle

    return around


def read_norm(by_default: Handler, in_step: Callable[[], bool]) -> Handler:
    """Return a handler that, outside steps, returns the norm of the full tensor as a plain 0-dimensional tensor."""

    def handle(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        norm = by_default(operation, args, kwargs)
        is_number = isinstance(norm, DTensor) and norm.dim() == 0 and not norm.requires_grad
        return norm.full_tensor() if is_number and not in_step() else norm

    return handle


def handle_mixed(by_default: Handler, in_step: Callable[[], bool]) -> Handler:
    """Return a handler that, outside steps, runs operations on full tensors if DTensors and plain tensors are mixed."""

    def handle(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        target, *others = args
        in_place = _writes_in_place(operation)
        joined = operation.overloadpacket in (aten.cat, aten.stack)
        into_plain = in_place and isinstance(target, Tensor) and not isinstance(target, DTensor)
        if not _are_mixed(args, kwargs, 0 if joined or into_plain else 1) or in_step():
            return by_default(operation, args, kwargs)
        if not in_place:
            return on_full(operation, args, kwargs)
        if isinstance(target, list | tuple):  # torch's _foreach operations
            for number, tensor in enumerate(target):
                _write(operation, [tensor], [_nth(other, number) for other in others], kwargs)
        else:
            _write(operation, target, others, kwargs)
        return target if schema_of(operation).returns else None

    return handle


def _write(operation: Any, target: Any, others: list[Any], kwargs: dict[str, Any]) -> None:
    [tensor] = target if isinstance(target, list) else [target]
    others, kwargs = as_full(others), {key: as_full(value) for key, value in kwargs.items()}
    if not isinstance(tensor, DTensor):
        operation(target, *others, **kwargs)
        return
    chunk = own_chunk(tensor)
    if chunk is None:
        raise RuntimeError(f"{operation}: got mixed torch.Tensor and DTensor")
    full = full_from_chunk(tensor, chunk)
    operation([full] if isinstance(target, list) else full, *others, **kwargs)
    local_of(tensor).copy_(full[chunk])


def _nth(other: Any, number: int) -> Any:
    return [other[number]] if isinstance(other, list | tuple) else other


def _are_mixed(args: tuple[Any, ...], kwargs: dict[str, Any], min_dim: int) -> bool:
    """Return whether the arguments contain both DTensors and plain tensors with at least `min_dim` dimensions."""
    sharded = plain = False
    for tensor in _tensors((*args, *kwargs.values())):
        if isinstance(tensor, DTensor):
            sharded = True
        elif tensor.dim() >= min_dim:
            plain = True
    return sharded and plain


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


@cache
def _writes_in_place(operation: Any) -> bool:
    alias = schema_of(operation).arguments[0].alias_info
    return alias is not None and alias.is_write


def _tolist(tensor: Any) -> Any:
    return tensor.full_tensor().tolist()


def _numpy(tensor: Any, **options: Any) -> Any:
    array = tensor.full_tensor().numpy(**options)
    array.flags.writeable = False  # writes to it would be lost, because it is a copy
    return array


def _array(tensor: Any, dtype: Any = None, copy: bool | None = None) -> Any:
    array = _numpy(tensor)
    return array.astype(dtype or array.dtype) if copy else array if dtype is None else array.astype(dtype)


def _format(tensor: Any, specification: str) -> str:
    return format(tensor.item() if tensor.dim() == 0 else repr(tensor), specification)


CONVERSIONS = {"tolist": _tolist, "numpy": _numpy, "__array__": _array, "__format__": _format}
"""Methods of DTensors that convert to Python and NumPy, which torch (2.13) refuses. *Collective*."""


def handlers(by_default: Handler, in_step: Callable[[], bool]) -> dict[Any, Handler]:
    """Return the handlers by operation.

    Args:
        by_default: runs an operation as torch does.
        in_step: returns whether a step is running.
    """
    found: dict[Any, Handler] = {
        aten._local_scalar_dense.default: _unless_replicated(read_number, by_default),
        aten.unbind.int: _unless_replicated(_unbind, by_default),
    }
    handle = handle_mixed(by_default, in_step)
    found[aten.linalg_vector_norm.default] = read_norm(by_default, in_step)
    for operation in _overloads(GATHERED):
        found[operation] = lambda *called: (by_default if in_step() else on_full)(*called)
    for operation in _overloads(WITHOUT_IDENTITY):
        found[operation] = handle_empty_shards(found.get(operation, by_default))
    for name in MIXED:
        packet = getattr(aten, name)
        for overload in packet.overloads():
            if not overload.endswith("out"):
                found[getattr(packet, overload)] = handle
    found |= dict.fromkeys(_overloads(WRONG_ON_SHARDS), on_full)  # inside steps as well
    for operation in _overloads(SUPPORTED_LATER):
        if not has_strategy(operation):
            found[operation] = lambda *called: (by_default if in_step() else on_full)(*called)
    found |= dict.fromkeys(_overloads(BACKWARD_OF_MEANS), _shard_result_like_second(by_default))
    found |= {operation: _make_dim_positive(found.get(operation, by_default)) for operation in _overloads(CUMULATIVE)}
    if not has_strategy(aten.detach_.default):  # called by autograd, with nothing to do for shards
        found[aten.detach_.default] = lambda operation, args, kwargs: args[0]
    return found


def _overloads(names: Iterable[str]) -> Iterator[Any]:
    for name in names:
        packet, overload = name.split(".")
        if overload in getattr(aten, packet).overloads():
            yield getattr(getattr(aten, packet), overload)


def _unless_replicated(handler: Handler, by_default: Handler) -> Handler:
    def handle(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        chosen = by_default if is_replicated(args[0]) else handler
        return chosen(operation, args, kwargs)

    return handle
