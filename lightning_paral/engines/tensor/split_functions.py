"""Functions of which each rank can compute its part: elementwise ones, reductions, products and attention."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from lightning_paral.engines.tensor import proven
from lightning_paral.engines.tensor.arguments import Part, with_tensors
from lightning_paral.engines.tensor.functions import functions
from lightning_paral.engines.tensor.layout import Layout
from lightning_paral.engines.tensor.split_calls import Call, Rule, SplitCall, broadcast, dims_of


def _elementwise(call: Call) -> SplitCall | None:
    """Compute each element from those at the same place in all tensors, after they are broadcast."""
    if call.kwargs.get("out") is not None:
        return None
    found = broadcast(call, call.tensors)
    if found is None:
        return None
    layout, parts = found
    if proven.is_in_place(call.function) and (call.args[0].ndim <= layout.dim or id(call.args[0]) in parts):
        return None
    is_random = call.function in proven.DROPOUT and proven.draws(call.args, call.kwargs)
    if not parts:
        return call.stays(layout, is_random=is_random)
    args, kwargs = with_tensors((call.args, call.kwargs), lambda tensor: parts.get(id(tensor), tensor))
    return SplitCall(call.function, args, kwargs, layout, is_random=is_random)


def _conversion(call: Call) -> SplitCall | None:
    """Convert the first tensor to the dtype and device of a second one, if one is given."""
    is_name = proven.name_of(call.function) == "type" and len(call.args) + len(call.kwargs) == 1
    return call.stays(call.layout_of(call.args[0])) if call.args and not is_name else None


def _along_dim(position: int, default: int | None = None) -> Rule:
    """Return the rule for a function along one dimension, which keeps the shape.

    Args:
        position: of the argument `dim`.
        default: of `dim`.
    """

    def rule(call: Call) -> SplitCall | None:
        layout = call.layout_of(call.args[0]) if call.args else None
        dim = call.args[position] if len(call.args) > position else call.kwargs.get("dim", default)
        if layout is None or len(call.tensors) > 1:
            return None
        dims = dims_of(dim, call.args[0].ndim)
        return call.stays(layout) if dims is not None and layout.dim not in dims else None

    return rule


def _norm(call: Call) -> SplitCall | None:
    """Normalize over the last dimensions."""
    given = call.given("input", "normalized_shape", "weight", "bias", "eps") or call.given(
        "input", "normalized_shape", "weight", "eps"
    )
    if given is None or not isinstance(given["input"], Tensor):
        return None
    layout = call.layout_of(given["input"])
    others = [given.get(name) for name in ("weight", "bias")]
    if layout is None or any(isinstance(each, Tensor) and call.layout_of(each) is not None for each in others):
        return None
    shape = given["normalized_shape"]
    num_dims = 1 if isinstance(shape, int) else len(shape)
    return call.stays(layout) if layout.dim < given["input"].ndim - num_dims else None


def _reduction(call: Call) -> SplitCall | None:
    """Reduce other dimensions than the one that is split."""
    layout = call.layout_of(call.args[0]) if call.args else None
    dim = call.args[1] if len(call.args) > 1 else call.kwargs.get("dim")
    if layout is None or len(call.tensors) > 1 or len(call.args) > 3 or call.kwargs.get("out") is not None:
        return None
    num_dims = call.args[0].ndim
    dims = None if dim in (None, (), []) else dims_of(dim, num_dims)
    if dims is None or layout.dim in dims:
        return None
    keeps = call.args[2] if len(call.args) > 2 else call.kwargs.get("keepdim", False)
    return call.stays(layout if keeps else layout.moved(layout.dim - sum(each < layout.dim for each in dims)))


def _matmul(call: Call) -> SplitCall | None:
    """Multiply matrices whose batch dimensions are split, or the rows of the first, or the columns of the second."""
    given = call.given("input", "other")
    if given is None or len(given) != 2 or not all(isinstance(each, Tensor) for each in given.values()):
        return None
    first, second = given.values()
    num_dims = max(first.ndim, second.ndim)
    if min(first.ndim, second.ndim) < 2:
        return None
    layouts = [call.layout_of(each) for each in (first, second)]
    places = [
        None if layout is None else layout.dim - each.ndim
        for layout, each in zip(layouts, (first, second), strict=True)
    ]
    place = next(each for each in places if each is not None)
    layout = next(each for each in layouts if each is not None)
    if place >= -2:  # a dimension of one of the matrices
        has_free = (places == [-2, None]) or (places == [None, -1])
        return call.stays(layout.moved(num_dims + place)) if has_free else None
    if None not in places and (places[0] != places[1] or layouts[0].segments != layouts[1].segments):  # type: ignore[union-attr]
        return None
    return _with_batch_parts(call, first, second, layout.moved(num_dims + place))


def _with_batch_parts(call: Call, first: Tensor, second: Tensor, result: Layout) -> SplitCall | None:
    num_dims = max(first.ndim, second.ndim)
    args: list[Any] = []
    for each in (first, second):
        dim = result.dim - (num_dims - each.ndim)
        if call.layout_of(each) is None and dim >= 0 and each.shape[dim] != 1:
            if each.shape[dim] != result.size:
                return None
            args.append(Part(each, result.moved(dim)))
        else:
            args.append(each)
    return SplitCall(call.function, tuple(args), {}, result)


def _einsum(call: Call) -> SplitCall | None:
    """Compute a sum of products, if the letter of the split dimension is in the result."""
    if call.kwargs or not call.args or not isinstance(call.args[0], str):
        return None
    inputs, arrow, output = call.args[0].replace(" ", "").partition("->")
    operands = call.args[1:]
    if len(operands) == 1 and isinstance(operands[0], tuple | list):
        operands = tuple(operands[0])
    terms = inputs.split(",")
    if not arrow or "." in call.args[0] or len(terms) != len(operands):
        return None
    found: tuple[str, tuple[int, ...]] | None = None
    for term, operand in zip(terms, operands, strict=True):
        layout = call.layout_of(operand)
        if layout is not None:
            own = term[layout.dim], layout.segments
            if found not in (None, own):
                return None
            found = own
    if found is None or found[0] not in output:
        return None
    letter, segments = found
    args = [
        Part(operand, Layout(term.index(letter), segments))
        if letter in term and call.layout_of(operand) is None
        else operand
        for term, operand in zip(terms, operands, strict=True)
    ]
    return SplitCall(call.function, (call.args[0], *args), {}, Layout(output.index(letter), segments))


def _attention(call: Call) -> SplitCall | None:
    """Attend, with the heads split."""
    given = call.given(
        *("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa"),
    )
    if given is None or not {"query", "key", "value"} <= set(given):
        return None
    query, key, value = (call.layout_of(given[name]) for name in ("query", "key", "value"))
    num_dims = given["query"].ndim
    if query is None or key is None or key != value or query.dim != key.dim or query.dim > num_dims - 3:
        return None
    if query != key and not (given.get("enable_gqa") and len(query.segments) == len(key.segments) == 1):
        return None
    mask = given.get("attn_mask")
    if isinstance(mask, Tensor):
        dim = query.dim - (num_dims - mask.ndim)
        layout = call.layout_of(mask)
        if layout is not None:
            if layout != query.moved(dim):
                return None
        elif dim >= 0 and mask.shape[dim] != 1:
            if mask.shape[dim] != query.size:
                return None
            given["attn_mask"] = Part(mask, query.moved(dim))
    return SplitCall(call.function, (), given, query, is_random=given.get("dropout_p", 0.0) > 0)


def _linear(call: Call) -> SplitCall | None:
    """Apply a whole linear layer to rows that are split."""
    given = call.given("input", "weight", "bias")
    if given is None or len(call.tensors) != len([each for each in given.values() if each is not None]):
        return None
    layout = call.layout_of(given["input"])
    others = [each for name, each in given.items() if name != "input" and each is not None]
    if layout is None or any(call.layout_of(each) is not None for each in others):
        return None
    return call.stays(layout) if layout.dim < given["input"].ndim - 1 else None


def _where(call: Call) -> SplitCall | None:
    """Choose between two tensors; with a condition alone, it returns indices."""
    return _elementwise(call) if len(call.args) + len(call.kwargs) == 3 else None


_MORE_ELEMENTWISE = (
    "masked_fill masked_fill_ addcmul addcdiv lerp logical_and logical_or logical_not isnan isinf isfinite floor "
    "ceil round trunc __and__ __or__ __xor__ __invert__ bitwise_and bitwise_or bitwise_not remainder fmod atan2 "
    "__mod__ logaddexp polar"
)

RULES: dict[Any, Rule] = {
    **dict.fromkeys((*proven.UNARY, *proven.BINARY, *proven.DROPOUT, *functions(_MORE_ELEMENTWISE)), _elementwise),
    **dict.fromkeys(functions("where"), _where),
    **dict.fromkeys(proven.CONVERSIONS, _conversion),
    **dict.fromkeys(functions("softmax log_softmax cumsum"), _along_dim(1)),
    functional.softmax: _along_dim(1),
    functional.log_softmax: _along_dim(1),
    functional.normalize: _along_dim(2, 1),
    **dict.fromkeys((functional.layer_norm, functional.rms_norm, *functions("layer_norm rms_norm")), _norm),
    **dict.fromkeys(functions("sum mean amax amin var std logsumexp prod"), _reduction),
    **dict.fromkeys(functions("matmul bmm __matmul__"), _matmul),
    torch.einsum: _einsum,
    proven.ATTENTION: _attention,
    functional.linear: _linear,
}
"""The rules of functions that compute values."""
