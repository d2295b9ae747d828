"""Functions that move, add and repeat dimensions, which each rank can compute on its part."""

from typing import Any

from torch import Tensor

from lightning_paral.engines.tensor.functions import functions, getters
from lightning_paral.engines.tensor.layout import Layout
from lightning_paral.engines.tensor.split_calls import Call, Rule, SplitCall, dims_of, flat, rule_of_one


@rule_of_one("dim")
def _squeeze(call: Call, layout: Layout, given: dict[str, Any]) -> SplitCall | None:
    # The dimension that is split may have size 1 here, but not in the full tensor.
    shape = given["input"].shape
    dims = dims_of(given.get("dim", range(len(shape))), len(shape)) if "dim" in given else list(range(len(shape)))
    if dims is None:
        return None
    removed = tuple(dim for dim in dims if shape[dim] == 1)
    result = layout.moved(layout.dim - sum(dim < layout.dim for dim in removed))
    return SplitCall(Tensor.squeeze, (given["input"], removed), {}, result, shares_memory=True)


@rule_of_one("dim")
def _unsqueeze(call: Call, layout: Layout, given: dict[str, Any]) -> SplitCall | None:
    dims = dims_of(given["dim"], given["input"].ndim + 1)
    return None if dims is None else call.stays(layout.moved(layout.dim + (dims[0] <= layout.dim)), shares_memory=True)


@rule_of_one("dim0", "dim1")
def _transpose(call: Call, layout: Layout, given: dict[str, Any]) -> SplitCall | None:
    dims = dims_of([given.get("dim0"), given.get("dim1")], given["input"].ndim)
    return None if dims is None else _permuted(call, layout, {dims[0]: dims[1], dims[1]: dims[0]})


@rule_of_one("source", "destination")
def _movedim(call: Call, layout: Layout, given: dict[str, Any]) -> SplitCall | None:
    num_dims = given["input"].ndim
    source, target = dims_of(given["source"], num_dims), dims_of(given["destination"], num_dims)
    if source is None or target is None:
        return None
    moved = dict(zip(target, source, strict=True))
    others = iter(dim for dim in range(num_dims) if dim not in source)
    order = [moved[dim] if dim in moved else next(others) for dim in range(num_dims)]
    return call.stays(layout.moved(order.index(layout.dim)), shares_memory=True)


def _permute(call: Call) -> SplitCall | None:
    layout = call.layout_of(call.args[0]) if call.args else None
    dims = flat(call.kwargs["dims"] if call.kwargs.keys() == {"dims"} else call.args[1:])
    order = None if layout is None else dims_of(dims, call.args[0].ndim)
    if layout is None or order is None or sorted(order) != list(range(call.args[0].ndim)):
        return None
    return call.stays(layout.moved(order.index(layout.dim)), shares_memory=True)


@rule_of_one()
def _matrix_transpose(call: Call, layout: Layout, given: dict[str, Any]) -> SplitCall | None:
    last = given["input"].ndim - 1
    return _permuted(call, layout, {last: last - 1, last - 1: last}) if last > 0 else None


def _permuted(call: Call, layout: Layout, targets: dict[int, int]) -> SplitCall:
    return call.stays(layout.moved(targets.get(layout.dim, layout.dim)), shares_memory=True)


def _expand(call: Call) -> SplitCall | None:
    layout = call.layout_of(call.args[0]) if call.args else None
    sizes = list(flat(call.args[1:]))
    if layout is None or call.kwargs or not all(isinstance(size, int) for size in sizes):
        return None
    dim = layout.dim + len(sizes) - call.args[0].ndim
    if sizes[dim] not in (-1, layout.size):
        return None
    sizes[dim] = -1
    return SplitCall(call.function, (call.args[0], *sizes), {}, layout.moved(dim), shares_memory=True)


@rule_of_one("repeats", "dim")
def _repeat_interleave(call: Call, layout: Layout, given: dict[str, Any]) -> SplitCall | None:
    dims = dims_of([given.get("repeats"), given.get("dim")], 2**62)
    if dims is None:
        return None
    if given["dim"] % given["input"].ndim != layout.dim:
        return call.stays(layout)
    return call.stays(Layout(layout.dim, tuple(size * given["repeats"] for size in layout.segments)))


def _repeat(call: Call) -> SplitCall | None:
    layout = call.layout_of(call.args[0]) if call.args else None
    repeats = flat(call.args[1:])
    if layout is None or call.kwargs or not all(isinstance(each, int) for each in repeats):
        return None
    dim = layout.dim + len(repeats) - call.args[0].ndim
    return call.stays(layout.moved(dim)) if repeats[dim] == 1 else None


@rule_of_one()
def _as_complex(call: Call, layout: Layout, given: dict[str, Any]) -> SplitCall | None:
    return call.stays(layout, shares_memory=True) if layout.dim < given["input"].ndim - 1 else None


@rule_of_one()
def _as_real(call: Call, layout: Layout, given: dict[str, Any]) -> SplitCall | None:
    return call.stays(layout, shares_memory=True)


@rule_of_one("diagonal")
def _triangle(call: Call, layout: Layout, given: dict[str, Any]) -> SplitCall | None:
    return call.stays(layout) if layout.dim < given["input"].ndim - 2 else None


RULES: dict[Any, Rule] = {
    **dict.fromkeys(functions("squeeze"), _squeeze),
    **dict.fromkeys(functions("unsqueeze"), _unsqueeze),
    **dict.fromkeys(functions("transpose swapaxes swapdims"), _transpose),
    **dict.fromkeys(functions("movedim moveaxis"), _movedim),
    **dict.fromkeys(functions("permute"), _permute),
    **dict.fromkeys(getters("mT"), _matrix_transpose),
    **dict.fromkeys(functions("expand"), _expand),
    **dict.fromkeys(functions("repeat_interleave"), _repeat_interleave),
    **dict.fromkeys(functions("repeat"), _repeat),
    **dict.fromkeys(functions("view_as_complex"), _as_complex),
    **dict.fromkeys(functions("view_as_real"), _as_real),
    **dict.fromkeys(functions("tril triu"), _triangle),
}
"""The rules of functions that move, add and repeat dimensions."""
