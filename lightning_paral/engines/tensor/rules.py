"""Which functions of torch each rank can compute on its parts of tensors, and what part of the result it then has.

Shapes answer it, on tensors without memory. Most functions treat a dimension alike in all places: if the result has it,
each rank computes its part, and otherwise they mix it. To see which, the dimension that is split is made longer: the
result has it where it gets longer as well. It must be so in one dimension, so tensors that do not fit raise an error.
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, product
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from lightning_paral.engines.tensor.layout import Layout

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


_UNARY = (
    "relu relu6 gelu silu sigmoid tanh elu selu celu leaky_relu softplus mish hardswish hardsigmoid hardtanh "
    "logsigmoid softsign tanhshrink softshrink hardshrink threshold exp expm1 log log1p neg negative abs sqrt "
    "rsqrt square sin cos erf reciprocal sign positive clamp clamp_min clamp_max clip nan_to_num floor ceil round "
    "trunc isnan isinf isfinite logical_not bitwise_not dropout"
)
_BINARY = (
    "add sub subtract mul multiply div divide true_divide pow float_power maximum minimum eq ne gt ge lt le "
    "masked_fill addcmul addcdiv lerp logical_and logical_or bitwise_and bitwise_or remainder fmod atan2"
)
_OPERATORS = (
    "add radd sub rsub mul rmul truediv rtruediv rdiv pow rpow iadd isub imul itruediv idiv ipow neg pos abs eq "
    "ne lt le gt ge and or xor invert mod matmul rmatmul"
)
_IN_PLACE = " ".join(f"{name}_" for name in (_UNARY + " " + _BINARY).split())
_OTHERS = (
    "rsub where logaddexp polar matmul bmm einsum linear layer_norm rms_norm sum "
    "mean amax amin var std logsumexp prod norm transpose swapaxes swapdims movedim moveaxis permute unbind "
    "select stack t view_as_complex view_as_real repeat_interleave repeat"
)
ALIKE = named(f"{_UNARY} {_BINARY} {_IN_PLACE} {_OTHERS}") | named(
    " ".join(f"__{name}__" for name in _OPERATORS.split()), Tensor
)
"""The functions that treat a dimension alike in all places, or whose result does not have it."""
ALONG = {
    **dict.fromkeys(named("softmax log_softmax cumsum"), (1, None)),
    functional.normalize: (2, 1),
    **dict.fromkeys(named("cat concat concatenate"), (1, 0)),
}
"""Functions along a dimension, which the result has: the position and the default of the argument `dim`."""
OF_LAST = named("tril triu scaled_dot_product_attention")
"""Functions whose result depends on places in the last two dimensions, and has these."""
CONVERSIONS = named("to type type_as float half bfloat16 double contiguous clone cuda")
RESHAPES = named("view reshape flatten unflatten squeeze unsqueeze view_as reshape_as")
PIECES = named("chunk split __getitem__ narrow")
_MAY_REPEAT = named("repeat_interleave")
_ATTENTION = functional.scaled_dot_product_attention
_MAX_WHOLE = 4
"""Tensors that every rank has in full, of which parts are tried: each one doubles what there is to try."""
_JOINS = named("cat concat concatenate")


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
    first = args[0] if args and isinstance(args[0], Tensor) else None
    layout = None if first is None else layout_of(first)
    if function in RESHAPES and first is not None and layout is not None:
        return _reshaped(function, args, kwargs, first, layout, ranks)
    if function in PIECES and first is not None and layout is not None:
        if len(tensors) > 1:
            is_index = function is Tensor.__getitem__ and all(layout_of(each) is None for each in tensors[1:])
            return _indexed(args[1], first, layout) if is_index else None
        return _alike(function, args, kwargs, tensors, [layout], ranks) or _in_pieces(
            function, args, kwargs, first, layout, ranks
        )
    if function is Tensor.expand and first is not None and layout is not None:
        return _expanded([*args[1:], *kwargs.values()], first, layout)
    layouts = [layout_of(each) for each in tensors]
    if function in ALONG:
        return _along(function, args, kwargs, tensors, layouts, ranks)
    if function in OF_LAST:
        places = [each.dim - tensor.ndim for tensor, each in zip(tensors, layouts, strict=True) if each is not None]
        return None if max(places) >= -2 else _alike(function, args, kwargs, tensors, layouts, ranks)
    return _alike(function, args, kwargs, tensors, layouts, ranks) if function in ALIKE else None


# Functions that treat a dimension alike


def _alike(
    function: Any, args: Any, kwargs: Any, tensors: Sequence[Tensor], layouts: Sequence[Layout | None], ranks: int
) -> Found | None:
    if kwargs.get("out") is not None or (is_in_place(function) and layouts[0] is None):
        return None
    split = [each for each in layouts if each is not None]
    given = split[0]
    if any(each.segments != given.segments for each in split) and not _are_grouped_heads(function, split, ranks):
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
        results = [_carried(before, after, given) for before, after in zip(shapes, found, strict=False)]
        known = [each for each in results if each is not None]
        if not known or len(known) != len(shapes) or len(known) != len(found):
            continue
        repeats = function in _MAY_REPEAT and len(shapes[0]) == tensors[0].ndim and given.is_even(ranks)
        if any(each.size != given.size for each in known) and not repeats:
            return None
        return Found(known[0] if isinstance(result, Tensor) else tuple(known), parts)
    return None


def _are_grouped_heads(function: Any, split: Sequence[Layout], ranks: int) -> bool:
    """Return whether an attention has fewer heads of keys than of queries, and each rank those that belong together."""
    return function is _ATTENTION and all(len(each.segments) == 1 and each.is_even(ranks) for each in split)


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


def _along(
    function: Any, args: Any, kwargs: Any, tensors: Sequence[Tensor], layouts: Sequence[Layout | None], ranks: int
) -> Found | None:
    position, default = ALONG[function]
    dim = args[position] if len(args) > position else kwargs.get("dim", default)
    if not isinstance(dim, int):
        return None
    dim %= tensors[0].ndim
    split = [each for each in layouts if each is not None]
    if all(each.dim != dim for each in split):
        return _alike(function, args, kwargs, tensors, layouts, ranks)
    if function in _JOINS and len(split) == len(layouts) and all(each.dim == dim for each in split):
        return Found(Layout(dim, tuple(size for each in split for size in each.segments)))
    return None


# Functions that change the shape


def _reshaped(function: Any, args: Any, kwargs: Any, first: Tensor, layout: Layout, ranks: int) -> Found | Cuts | None:
    if any(isinstance(value, torch.dtype) for value in (*args, *kwargs.values())):
        return None  # a view of the same bytes
    result = _result(function, args, kwargs)
    if not isinstance(result, Tensor):
        return None
    found = reshaped(first.shape, result.shape, layout, ranks)
    if found is None:
        for count in (2, 3, 4):  # such as a view of queries, keys and values
            size, rest = divmod(layout.size, count)
            cut = Layout(layout.dim, (size,) * count)
            if not rest and reshaped(first.shape, result.shape, cut, ranks) is not None:
                return frozenset(range(size, layout.size, size))
        return None
    shape = list(result.shape)
    shape[found.dim] = -1
    return Found(found, function=Tensor.view if function is Tensor.view else Tensor.reshape, rest=(shape,))


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
    for first, last in _groups(before, after):
        if layout.dim in first:
            sizes = [size for size in after[last.start : last.stop] if size != 1]
            if sizes == [layout.size] and all(before[dim] == 1 for dim in first if dim != layout.dim):
                return layout.moved(next(dim for dim in last if after[dim] != 1))
            behind = math.prod(before[layout.dim + 1 : first.stop])
            runs = [size * behind for size in layout.segments] * math.prod(before[first.start : layout.dim])
            for dim in last:
                segments = _segments(runs, math.prod(after[last.start : dim]), math.prod(after[dim + 1 : last.stop]))
                if segments is not None and Layout(dim, segments).is_even(ranks) and layout.is_even(ranks):
                    return Layout(dim, segments)
    return None


def _groups(before: Sequence[int], after: Sequence[int]) -> Iterator[tuple[range, range]]:
    """Yield the smallest groups of consecutive dimensions before and after a reshape that have the same elements."""
    i = j = 0
    while i < len(before) or j < len(after):
        start, other = i, j
        left = right = 1
        while left != right or (i == start and j == other):
            if (left <= right and i < len(before)) or j == len(after):
                left, i = left * before[i], i + 1
            else:
                right, j = right * after[j], j + 1
        while i < len(before) and before[i] == 1:
            i += 1
        while j < len(after) and after[j] == 1:
            j += 1
        yield range(start, i), range(other, j)


def _segments(runs: list[int], num_pieces: int, behind: int) -> tuple[int, ...] | None:
    """Return the segments of a dimension in which each of `num_pieces` pieces has the same runs of elements.

    Args:
        runs: the elements, one segment after another.
        num_pieces: the product of the dimensions before it.
        behind: the product of the dimensions behind it.
    """
    count, rest = divmod(len(runs), num_pieces)
    if rest or runs != runs[:count] * num_pieces or any(size % behind for size in runs[:count]):
        return None
    return tuple(size // behind for size in runs[:count])


def _expanded(given: list[Any], first: Tensor, layout: Layout) -> Found | None:
    sizes = list(given[0]) if len(given) == 1 and isinstance(given[0], Sequence) else given
    dim = layout.dim + len(sizes) - first.ndim
    if len(sizes) < first.ndim or not all(isinstance(size, int) for size in sizes):
        return None
    if sizes[dim] not in (-1, layout.size):
        return None
    sizes[dim] = -1
    return Found(layout.moved(dim), function=Tensor.expand, rest=(sizes,))


def _in_pieces(function: Any, args: Any, kwargs: Any, first: Tensor, layout: Layout, ranks: int) -> Found | Cuts | None:
    """Find where pieces of the dimension that is split begin and end: only this one has a stride that is not 0."""
    strides = [2 * int(dim == layout.dim) for dim in range(first.ndim)]  # not 1, as of copies
    try:
        result = function(torch.empty_strided(first.shape, strides, device="meta"), *args[1:], **kwargs)
    except Exception:
        return None
    pieces = [result] if isinstance(result, Tensor) else list(result)
    places = []
    for piece in pieces:
        is_view = [*piece.stride()] == strides and _others(piece, layout.dim) == _others(first, layout.dim)
        if not is_view or not piece.numel():
            return None
        start = int(piece.storage_offset()) // 2
        places.append((start, start + piece.shape[layout.dim]))
    ends = [0, *accumulate(layout.segments)]
    cuts = frozenset(chain(*places)).difference(ends)
    is_whole = places == [(0, layout.size)]
    if cuts or not (is_whole or layout.is_even(ranks)):
        return cuts or None
    layouts = [Layout(layout.dim, layout.segments[ends.index(start) : ends.index(stop)]) for start, stop in places]
    slices = [slice(None) if is_whole else slice(start // ranks, stop // ranks) for start, stop in places]
    is_one = isinstance(result, Tensor)
    return Found(layouts[0] if is_one else tuple(layouts), function=_cut, rest=(layout.dim, slices, is_one))


def _others(tensor: Tensor, dim: int) -> list[int]:
    return [*tensor.shape[:dim], *tensor.shape[dim + 1 :]]


def _cut(local: Tensor, dim: int, places: Sequence[slice], is_one: bool) -> Any:
    pieces = tuple(local[(slice(None),) * dim + (place,)] for place in places)
    return pieces[0] if is_one else pieces


def _indexed(index: Any, first: Tensor, layout: Layout) -> Found | None:
    """Index other dimensions than the last one by tensors, such as a mask of positions."""
    items = list(index) if isinstance(index, tuple) else [index]
    if not all(isinstance(item, Tensor | slice) for item in items) or layout.dim != first.ndim - 1:
        return None
    masks = (torch.bool, torch.uint8)
    sizes = [item.ndim if isinstance(item, Tensor) and item.dtype in masks else 1 for item in items]
    removed = [size for item, size in zip(items, sizes, strict=True) if isinstance(item, Tensor)]
    if sum(sizes) >= first.ndim or len(removed) != 1:
        return None
    (tensor,) = [item for item in items if isinstance(item, Tensor)]
    added = 1 if tensor.dtype in masks else tensor.ndim
    return Found(layout.moved(layout.dim - removed[0] + added))


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


def tensors_in(args: Any, kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Return the tensors among the arguments, and in tuples, lists and dicts of them, in order.

    Not in those of other classes, such as named tuples.
    """
    found: list[Tensor] = []
    _collect(args, found)
    if kwargs:
        _collect(kwargs.values(), found)
    return found


def _collect(values: Any, found: list[Tensor]) -> None:
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif type(value) in (tuple, list):
            _collect(value, found)
        elif type(value) is dict:
            _collect(value.values(), found)


def with_tensors(value: Any, replace: Callable[[Tensor], Any]) -> Any:
    """Return arguments with `replace` of each tensor, in order. Tuples of other classes stay as they are."""
    if isinstance(value, Tensor):
        return replace(value)
    if type(value) is tuple:
        return tuple([with_tensors(each, replace) for each in value])
    if type(value) is list:
        return [with_tensors(each, replace) for each in value]
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


_NAME = re.compile(r"__i(add|sub|mul|div|truediv|floordiv|mod|pow|matmul|and|or|xor|lshift|rshift)__|.*[^_]_")


def is_in_place(function: Any) -> bool:
    """Return whether `function` changes its first argument."""
    return bool(_NAME.fullmatch(str(getattr(function, "__name__", ""))))


def draws(function: Any, args: Any, kwargs: Any) -> bool:
    """Return whether a function draws random numbers for its result."""
    if function is functional.scaled_dot_product_attention:
        return bool((args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0)) > 0)
    if function not in _DROPOUT:
        return False
    given = {**dict(zip(("input", "p", "training"), args, strict=False)), **kwargs}
    return bool(given.get("p", 0.5) and given.get("training", given.get("train", True)))


_DROPOUT = named("dropout dropout_")
