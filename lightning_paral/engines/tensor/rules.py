"""Which functions of torch each rank can compute on its parts of tensors, and what part of the result it then has.

Shapes answer it, on tensors without memory. Most functions treat a dimension alike in all places: if the result has it,
each rank computes its part, and otherwise they mix it. To see which, the dimension that is split is made longer: the
result has it where it gets longer as well. It must be so in one dimension, so tensors that do not fit raise an error.
For all other functions, the tensors are gathered.
"""

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, product
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from lightning_paral.engines.tensor.collectives import Layout

_LONGER = 7
"""How many times as long. Longer than any dimension of size 1, which functions would expand."""

LayoutOf = Callable[[Tensor], Layout | None]
"""Returns the layout of a tensor; `None` for one that every rank has in full."""


Cuts = frozenset[int]
"""Places between features where code cuts them, as into queries, keys and values."""


@dataclass(frozen=True)
class Found:
    """How each rank computes its part of a result."""

    result: Layout | tuple[Layout, ...]
    """The layout of the result, or of each of several tensors."""
    parts: tuple[Layout | None, ...] = ()
    """For each tensor among the arguments that every rank has in full: the needed part; `None` for all of it."""
    function: Any = None
    """If given, it is called instead, with this rank's part of the first argument, and with `rest`."""
    rest: tuple[Any, ...] = ()


def named(names: str, *owners: Any) -> frozenset[Any]:
    """Return the functions with these names, as far as this version of torch has them."""
    spaces = owners or (Tensor, torch, functional)
    return frozenset(getattr(each, name) for each in spaces for name in names.split() if hasattr(each, name))


_POINTWISE = (
    "relu gelu silu sigmoid tanh elu leaky_relu softplus mish exp log log1p neg abs sqrt rsqrt square sin cos erf "
    "reciprocal sign clamp clamp_min clamp_max clip nan_to_num floor round isnan isinf isfinite logical_not dropout "
    "add sub mul multiply div true_divide pow maximum minimum eq ne gt ge lt le masked_fill addcmul lerp logical_and "
    "relu6 selu celu hardtanh hardswish hardsigmoid threshold"  # like all activations of `torch.nn` with inplace=True
)
_OPERATORS = (
    "add radd sub rsub mul rmul truediv rtruediv rdiv pow rpow iadd isub imul itruediv idiv ipow neg pos abs eq "
    "ne lt le gt ge and or xor invert mod matmul rmatmul"
)
_OTHERS = (
    "rsub where polar matmul bmm einsum linear layer_norm rms_norm sum mean amax amin var std logsumexp prod norm "
    "transpose swapaxes movedim permute unbind select stack t view_as_complex view_as_real repeat_interleave repeat"
)
_ATTENTION = functional.scaled_dot_product_attention
_ALONG = {
    **dict.fromkeys(named("softmax log_softmax"), (1, None)),
    functional.normalize: (2, 1),
    **dict.fromkeys(named("cat concat concatenate"), (1, 0)),
}
"""Functions that mix the places of a dimension: the position and the default of the argument `dim`."""
CONVERSIONS = named("to type type_as float half bfloat16 double contiguous clone")
_ALIKE = (
    named(" ".join([_POINTWISE, *(f"{name}_" for name in _POINTWISE.split()), _OTHERS]))
    | named(" ".join(f"__{name}__" for name in _OPERATORS.split()), Tensor)
    | {*_ALONG, _ATTENTION, *CONVERSIONS}
)
"""The functions that treat all other dimensions alike in all places, or whose result does not have them."""
_SIZES_DIFFER = {_ATTENTION, *CONVERSIONS}
"""Functions of several tensors that need not have equal sizes in the dimension that is split."""
_RESHAPES = named("view reshape flatten unflatten squeeze unsqueeze view_as reshape_as expand")
_PIECES = named("chunk split __getitem__ narrow")
_MAY_REPEAT = named("repeat_interleave")
_MAX_SEGMENTS = 1024
"""More are not worth it, such as each row of logits that are viewed as one row."""
_MAX_WHOLE = 4
"""Tensors that every rank has in full, of which parts are tried: each one doubles what there is to try."""


def find(
    function: Any, args: Any, kwargs: Any, tensors: Sequence[Tensor], layout_of: LayoutOf, ranks: int
) -> Found | Cuts | None:
    """Return the `Found` of a call; `None` if the ranks cannot compute it on their parts.

    If they could, were the dimension that is split cut into segments at certain places, return these.

    Args:
        function: the function of torch.
        args: its arguments.
        kwargs: its arguments by name.
        tensors: the tensors among them, in order.
        layout_of: returns their layouts, of which there is at least one.
        ranks: the number of ranks.
    """
    layouts = [layout_of(each) for each in tensors]
    if args and isinstance(args[0], Tensor) and layouts[0] is not None:
        if function in _RESHAPES:
            return _reshaped(function, args, kwargs, layouts[0], ranks)
        if function in _PIECES and len(tensors) == 1:
            return _alike(function, args, kwargs, tensors, layouts, ranks) or _in_pieces(
                function, args, kwargs, layouts[0], ranks
            )
    if function not in _ALIKE:
        return None
    mixed = _mixed_dims(function, args, kwargs)
    split = [(tensor, each) for tensor, each in zip(tensors, layouts, strict=True) if each is not None]
    if mixed is None or any(each.dim - tensor.ndim in mixed or each.dim in mixed for tensor, each in split):
        return None
    return _alike(function, args, kwargs, tensors, layouts, ranks)


def _mixed_dims(function: Any, args: Any, kwargs: Any) -> tuple[int, ...] | None:
    """Return the dimensions of which a function mixes the places; `None` if it is not known."""
    if function is _ATTENTION:
        return -1, -2
    if function not in _ALONG:
        return ()
    position, default = _ALONG[function]
    dim = args[position] if len(args) > position else kwargs.get("dim", default)
    return (dim,) if isinstance(dim, int) else None


# Functions that treat a dimension alike


def _alike(
    function: Any, args: Any, kwargs: Any, tensors: Sequence[Tensor], layouts: Sequence[Layout | None], ranks: int
) -> Found | None:
    if kwargs.get("out") is not None or (is_in_place(function) and layouts[0] is None):
        return None
    split = [each for each in layouts if each is not None]
    given = split[0]
    # An attention may have fewer heads of keys than of queries. Each rank has those that belong together.
    may_differ = function is _ATTENTION and all(each.is_one_run(ranks) for each in split)
    if any(each.segments != given.segments for each in split) and not may_differ:
        return None
    if len(layouts) - len(split) > _MAX_WHOLE:
        return None
    result = _result(function, args, kwargs)
    shapes = _shapes_of(result)
    choices = [
        (None, *(Layout(dim, given.segments) for dim, size in enumerate(tensor.shape) if size == given.size))
        for tensor, layout in zip(tensors, layouts, strict=True)
        if layout is None
    ]
    for parts in product(*choices):
        chosen = iter(parts)
        longer = [layout or next(chosen) for layout in layouts]
        if function is _ATTENTION and not _has_same_heads(args, kwargs, tensors, longer):
            continue
        found = _shapes_of(_result(function, args, kwargs, longer))
        if function not in _SIZES_DIFFER and _adds_up_one(function, args, kwargs, longer, found):
            continue
        results = [_carried(before, after, given) for before, after in zip(shapes, found, strict=False)]
        known = [each for each in results if each is not None]
        if not known or len(known) != len(shapes) or len(known) != len(found):
            continue
        repeats = function in _MAY_REPEAT and len(shapes[0]) == tensors[0].ndim and given.is_even(ranks)
        if any(each.size != given.size for each in known) and not repeats:
            return None
        return Found(known[0] if isinstance(result, Tensor) else tuple(known), parts)
    return None


def _adds_up_one(
    function: Any, args: Any, kwargs: Any, longer: Sequence[Layout | None], found: Sequence[torch.Size]
) -> bool:
    """Return whether the result has the dimension of other tensors, and a tensor's own is added up: bi,bj->bi."""
    numbers = [number for number, layout in enumerate(longer) if layout is not None]
    others = ([None if each == number else layout for each, layout in enumerate(longer)] for number in numbers)
    return len(numbers) > 1 and any(_shapes_of(_result(function, args, kwargs, each)) == found for each in others)


def _has_same_heads(args: Any, kwargs: Any, tensors: Sequence[Tensor], layouts: Sequence[Layout | None]) -> bool:
    """Return whether all of queries, keys and values are split at the same place: their sizes need not be equal."""
    mask = args[3] if len(args) > 3 else kwargs.get("attn_mask")
    pairs = zip(tensors, layouts, strict=True)
    return len({each and each.dim - tensor.ndim for tensor, each in pairs if tensor is not mask}) == 1


def _carried(before: Sequence[int], after: Sequence[int], layout: Layout) -> Layout | None:
    """Return the layout of a result that gets longer with the dimension that is split."""
    if len(before) != len(after):
        return None
    dims = [dim for dim, sizes in enumerate(zip(before, after, strict=True)) if sizes[0] != sizes[1]]
    if len(dims) != 1 or after[dims[0]] != _LONGER * before[dims[0]]:
        return None
    times, rest = divmod(before[dims[0]], layout.size)
    return None if rest else Layout(dims[0], tuple(times * size for size in layout.segments))


# Functions that change the shape


def _reshaped(function: Any, args: Any, kwargs: Any, layout: Layout, ranks: int) -> Found | Cuts | None:
    result = _result(function, args, kwargs)
    is_of_bytes = any(isinstance(value, torch.dtype) for value in (*args, *kwargs.values()))
    if is_of_bytes or not isinstance(result, Tensor):
        return None
    before, shape = args[0].shape, list(result.shape)
    if function is Tensor.expand:
        dim = layout.dim + len(shape) - len(before)
        found = replace(layout, dim=dim) if shape[dim] == layout.size else None
    else:
        found = reshaped(before, shape, layout, ranks)
        function = Tensor.view if function is Tensor.view else Tensor.reshape
        if found is None:
            for count in (2, 3, 4):  # such as a view of queries, keys and values
                size, rest = divmod(layout.size, count)
                cut = Layout(layout.dim, (size,) * count)
                if not rest and reshaped(before, shape, cut, ranks) is not None:
                    return frozenset(range(size, layout.size, size))
    if found is None:
        return None
    shape[found.dim] = -1
    return Found(found, function=function, rest=(shape,))


def reshaped(before: Sequence[int], after: Sequence[int], layout: Layout, ranks: int) -> Layout | None:
    """Return the layout of a tensor after a reshape; `None` if the parts of the ranks would not be parts of it.

    Args:
        before: the full shape.
        after: the full shape of the result.
        layout: of the tensor.
        ranks: the number of ranks.
    """
    if math.prod(before) == 0:
        return None
    rows, behind = math.prod(before[: layout.dim]), math.prod(before[layout.dim + 1 :])
    for dim, size in enumerate(after):
        if size == layout.size and math.prod(after[:dim]) == rows:
            return replace(layout, dim=dim)
    if not layout.is_even(ranks):
        return None
    # Both divide the same elements in turn. Of each run of them, every rank has its part.
    runs = [size * behind for size in layout.segments] * rows
    for dim in range(len(after)):
        count, rest = divmod(len(runs), math.prod(after[:dim]))
        size = math.prod(after[dim + 1 :])
        is_periodic = not rest and runs == runs[:count] * (len(runs) // max(1, count))
        if is_periodic and count <= _MAX_SEGMENTS and all(run % (size * ranks) == 0 for run in runs[:count]):
            return Layout(dim, tuple(run // size for run in runs[:count]))
    return None


def _in_pieces(function: Any, args: Any, kwargs: Any, layout: Layout, ranks: int) -> Found | Cuts | None:
    """Find where pieces of the dimension that is split begin and end: only this one has a stride that is not 0."""
    shape, dim = list(args[0].shape), layout.dim
    strides = [2 * int(each == dim) for each in range(len(shape))]  # not 1, as of copies
    try:
        result = function(torch.empty_strided(shape, strides, device="meta"), *args[1:], **kwargs)
    except Exception:
        return None
    places = []
    for piece in (result,) if isinstance(result, Tensor) else result:
        own = list(piece.shape)
        length = own[dim] if len(own) == len(shape) else 0
        if not piece.numel() or [*piece.stride()] != strides or own != [*shape[:dim], length, *shape[dim + 1 :]]:
            return None
        start = int(piece.storage_offset()) // 2
        places.append((start, start + length))
    ends = [0, *accumulate(layout.segments)]
    cuts = frozenset(chain(*places)).difference(ends)
    if cuts or not layout.is_even(ranks):
        return cuts or None
    layouts = [Layout(dim, layout.segments[ends.index(start) : ends.index(stop)]) for start, stop in places]
    is_one = isinstance(result, Tensor)
    rest = dim, places, ranks, next if is_one else tuple
    return Found(layouts[0] if is_one else tuple(layouts), function=_pieces, rest=rest)


def _pieces(local: Tensor, dim: int, places: Sequence[tuple[int, int]], ranks: int, collect: Callable[..., Any]) -> Any:
    return collect(local.narrow(dim, start // ranks, (stop - start) // ranks) for start, stop in places)


# Arguments


def _result(function: Any, args: Any, kwargs: Any, longer: Iterable[Layout | None] = ()) -> Any:
    """Return the result on tensors without memory, some of which get longer; `None` if it is an error."""
    layouts = iter(longer)

    def empty(tensor: Tensor) -> Tensor:
        shape, layout = list(tensor.shape), next(layouts, None)
        if layout is not None:
            shape[layout.dim] *= _LONGER
        # One dtype for all numbers: autocast, which may make dtypes equal, does not do so here.
        return torch.empty(shape, dtype=torch.float32 if tensor.is_floating_point() else tensor.dtype, device="meta")

    args, kwargs = with_tensors((args, kwargs), empty)
    try:
        return function(*args, **kwargs)
    except Exception:  # the arguments do not fit, or their values are needed
        return None


def _shapes_of(result: Any) -> list[torch.Size]:
    if isinstance(result, Tensor):
        return [result.shape]
    return [each.shape for each in result] if isinstance(result, tuple | list) else []


def tensors_in(*values: Any) -> list[Tensor]:
    """Return the tensors among values, and in tuples, lists and dicts of them, in order.

    Not in those of other classes, such as named tuples.
    """
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif type(value) in (tuple, list):
            found += tensors_in(*value)
        elif type(value) is dict:
            found += tensors_in(*value.values())
    return found


def with_tensors(value: Any, replace: Callable[[Tensor], Any]) -> Any:
    """Return arguments with `replace` of each tensor, in order. Tuples of other classes stay as they are."""
    if isinstance(value, Tensor):
        return replace(value)
    if type(value) in (tuple, list):
        return type(value)([with_tensors(each, replace) for each in value])
    if type(value) is dict:
        return {name: with_tensors(each, replace) for name, each in value.items()}
    return value


def signature(value: Any, layout_of: LayoutOf) -> Any:
    """Return what the shapes of a result depend on, as a key; it cannot be hashed if an argument cannot."""
    if isinstance(value, Tensor):
        return tuple(value.shape), value.is_floating_point() or value.dtype, layout_of(value)
    if isinstance(value, tuple | list):
        return type(value), tuple([signature(each, layout_of) for each in value])
    if isinstance(value, dict):
        return tuple([(name, signature(each, layout_of)) for name, each in value.items()])
    if isinstance(value, slice):
        return value.start, value.stop, value.step, slice
    return type(value), value


_NAME = re.compile(
    r"__(setitem|set|delete)__|__i(add|sub|mul|div|truediv|floordiv|mod|pow|matmul|and|or|xor|lshift|rshift)__|.*[^_]_"
)


def is_in_place(function: Any) -> bool:
    """Return whether `function` changes its first argument."""
    return bool(_NAME.fullmatch(str(getattr(function, "__name__", ""))))


_DROPOUT = named("dropout dropout_")


def draws(function: Any, args: Any, kwargs: Any) -> bool:
    """Return whether a function draws random numbers for its result."""
    if function is _ATTENTION:
        return bool((args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0)) > 0)
    if function not in _DROPOUT:
        return False
    given = {**dict(zip(("input", "p", "training"), args, strict=False)), **kwargs}
    return bool(given.get("p", 0.5) and given.get("training", given.get("train", True)))
