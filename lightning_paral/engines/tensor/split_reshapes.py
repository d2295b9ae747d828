"""Functions that divide and merge dimensions, which each rank can compute on its part."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from lightning_paral.engines.tensor.functions import functions
from lightning_paral.engines.tensor.layout import Layout
from lightning_paral.engines.tensor.split_calls import Call, Rule, SplitCall, flat, rule_of_one


def reshaped(before: Sequence[int], after: Sequence[int], layout: Layout, num_ranks: int) -> Layout | None:
    """Return the layout of a tensor after a reshape; `None` if the parts of the ranks would not be parts of it.

    Args:
        before: the full shape.
        after: the full shape of the result.
        layout: of the tensor.
        num_ranks: the number of ranks.
    """
    if math.prod(before) == 0:
        return None
    for first, last in _groups(before, after):
        if layout.dim in first:
            behind = math.prod(before[layout.dim + 1 : first.stop])
            runs = [size * behind for size in layout.segments] * math.prod(before[first.start : layout.dim])
            for dim in last:
                segments = _segments(runs, math.prod(after[last.start : dim]), math.prod(after[dim + 1 : last.stop]))
                if segments is not None and all(size and size % num_ranks == 0 for size in segments):
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


def _to_shape(call: Call, layout: Layout, shape: Sequence[int]) -> SplitCall | None:
    """Return the call that gives a tensor the full shape `shape`."""
    result = reshaped(call.args[0].shape, shape, layout, call.num_ranks)
    if result is None:
        return None
    local = list(shape)
    local[result.dim] = result.local_size(call.num_ranks)
    is_view = call.function is Tensor.view
    return SplitCall(Tensor.view if is_view else Tensor.reshape, (call.args[0], local), {}, result, shares_memory=True)


def _reshape(call: Call) -> SplitCall | None:
    layout = call.layout_of(call.args[0]) if call.args else None
    sizes = flat(call.kwargs["shape"] if call.kwargs.keys() == {"shape"} else call.args[1:])
    if layout is None or not sizes or not all(isinstance(size, int) for size in sizes):
        return None
    if -1 in sizes:
        known = -math.prod(sizes)
        total = call.args[0].numel()
        if known <= 0 or total % known:
            return None
        sizes = tuple(total // known if size == -1 else size for size in sizes)
    return _to_shape(call, layout, sizes) if math.prod(sizes) == call.args[0].numel() else None


@rule_of_one("start_dim", "end_dim")
def _flatten(call: Call, layout: Layout, given: dict[str, Any]) -> SplitCall | None:
    shape = list(given["input"].shape)
    start, end = given.get("start_dim", 0) % len(shape), given.get("end_dim", -1) % len(shape)
    return _to_shape(call, layout, [*shape[:start], math.prod(shape[start : end + 1]), *shape[end + 1 :]])


@rule_of_one("dim", "sizes")
def _unflatten(call: Call, layout: Layout, given: dict[str, Any]) -> SplitCall | None:
    shape, sizes = list(given["input"].shape), list(given["sizes"])
    if not isinstance(given["dim"], int) or not all(isinstance(size, int) for size in sizes):
        return None
    dim = given["dim"] % len(shape)
    if -1 in sizes:
        known = -math.prod(sizes)
        if known <= 0 or shape[dim] % known:
            return None
        sizes = [shape[dim] // known if size == -1 else size for size in sizes]
    return _to_shape(call, layout, [*shape[:dim], *sizes, *shape[dim + 1 :]])


RULES: dict[Any, Rule] = {
    **dict.fromkeys(functions("view reshape"), _reshape),
    **dict.fromkeys(functions("flatten"), _flatten),
    **dict.fromkeys(functions("unflatten"), _unflatten),
}
"""The rules of functions that divide and merge dimensions."""
