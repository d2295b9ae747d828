"""Functions that take a tensor apart, or put it together, which each rank can compute on its part."""

from collections.abc import Sequence
from typing import Any

import torch

from lightning_paral.engines.tensor.functions import functions
from lightning_paral.engines.tensor.layout import Layout
from lightning_paral.engines.tensor.split_calls import Call, Rule, SplitCall, dims_of, rule_of_one


def _joined(call: Call, *, adds_dim: bool) -> SplitCall | None:
    """Concatenate or stack tensors that are split in the same way."""
    given = call.given("tensors", "dim")
    if given is None or not isinstance(given.get("tensors"), tuple | list):
        return None
    # torch.cat ignores tensors of shape [0], with which caches of keys and values begin.
    tensors = [each for each in given["tensors"] if adds_dim or tuple(each.shape) != (0,)]
    layouts = [call.layout_of(each) for each in tensors]
    layout, num_dims = layouts[0], tensors[0].ndim
    dims = dims_of(given.get("dim", 0), num_dims + adds_dim)
    if layout is None or dims is None or any(each is None or each.dim != layout.dim for each in layouts):
        return None
    if adds_dim or dims[0] != layout.dim:
        is_same = all(each == layout for each in layouts)
        return call.stays(layout.moved(layout.dim + (adds_dim and dims[0] <= layout.dim))) if is_same else None
    return call.stays(Layout(layout.dim, tuple(size for each in layouts if each is not None for size in each.segments)))


def _cat(call: Call) -> SplitCall | None:
    return _joined(call, adds_dim=False)


def _stack(call: Call) -> SplitCall | None:
    return _joined(call, adds_dim=True)


def _in_pieces(call: Call, layout: Layout, dim: int, sizes: Sequence[int]) -> SplitCall | None:
    """Divide a dimension into pieces with full sizes `sizes`."""
    if dim != layout.dim:
        return SplitCall(torch.split, (call.args[0], list(sizes), dim), {}, [layout for _ in sizes], shares_memory=True)
    layouts: list[Layout | None] = []
    rest = list(layout.segments)
    for size in sizes:
        found: list[int] = []
        while rest and sum(found) < size:
            found.append(rest.pop(0))
        if sum(found) != size or not found:
            return None
        layouts.append(Layout(dim, tuple(found)))
    if rest:
        return None
    local = [size // call.num_ranks for size in sizes]
    return SplitCall(torch.split, (call.args[0], local, dim), {}, layouts, shares_memory=True)


@rule_of_one("chunks", "dim")
def _chunk(call: Call, layout: Layout, given: dict[str, Any]) -> SplitCall | None:
    dim = given.get("dim", 0) % given["input"].ndim
    size = given["input"].shape[dim]
    per_chunk = -(-size // given["chunks"])
    return _in_pieces(call, layout, dim, _sizes(size, per_chunk))


@rule_of_one("split_size", "dim")
def _split(call: Call, layout: Layout, given: dict[str, Any]) -> SplitCall | None:
    dim, sizes = given.get("dim", 0) % given["input"].ndim, given.get("split_size")
    if isinstance(sizes, int):
        sizes = _sizes(given["input"].shape[dim], sizes)
    return None if not isinstance(sizes, tuple | list) else _in_pieces(call, layout, dim, sizes)


def _sizes(size: int, per_piece: int) -> list[int]:
    return [min(per_piece, size - start) for start in range(0, size, per_piece)]


@rule_of_one("dim")
def _unbind(call: Call, layout: Layout, given: dict[str, Any]) -> SplitCall | None:
    dim = given.get("dim", 0) % given["input"].ndim
    if dim == layout.dim:
        return None
    result = layout.moved(layout.dim - (dim < layout.dim))
    return SplitCall(torch.unbind, (given["input"], dim), {}, [result] * given["input"].shape[dim], shares_memory=True)


@rule_of_one("dim", "index")
def _select(call: Call, layout: Layout, given: dict[str, Any]) -> SplitCall | None:
    dims = dims_of(given["dim"], given["input"].ndim)
    if dims is None or dims[0] == layout.dim or not isinstance(given["index"], int):
        return None
    return call.stays(layout.moved(layout.dim - (dims[0] < layout.dim)), shares_memory=True)


@rule_of_one("dim", "start", "length")
def _narrow(call: Call, layout: Layout, given: dict[str, Any]) -> SplitCall | None:
    dims = dims_of(given["dim"], given["input"].ndim)
    if dims is None or not isinstance(given["start"], int):
        return None
    if dims[0] != layout.dim:
        return call.stays(layout, shares_memory=True)
    found = _sliced(layout, slice(given["start"], given["start"] + given["length"]), call.num_ranks)
    if found is None:
        return None
    own, result = found
    return SplitCall(
        torch.narrow, (given["input"], dims[0], own.start, own.stop - own.start), {}, result, shares_memory=True
    )


@rule_of_one("index")
def _index(call: Call, layout: Layout, given: dict[str, Any]) -> SplitCall | None:
    items = list(given["index"]) if isinstance(given["index"], tuple) else [given["index"]]
    is_known = all(item is None or item is Ellipsis or isinstance(item, int | slice) for item in items)
    if not is_known or any(isinstance(item, bool) for item in items):
        return None
    num_dims = given["input"].ndim
    missing = num_dims - sum(isinstance(item, int | slice) for item in items)
    at = next((number for number, item in enumerate(items) if item is Ellipsis), len(items))
    items[at : at + 1] = [slice(None)] * missing
    dim, target, result = 0, 0, None
    for number, item in enumerate(items):
        if item is None:
            target += 1
            continue
        if dim == layout.dim:
            found = _sliced(layout, item, call.num_ranks) if isinstance(item, slice) else None
            if found is None:
                return None
            items[number], result = found[0], found[1].moved(target)
        dim += 1
        target += isinstance(item, slice)
    return SplitCall(call.function, (given["input"], tuple(items)), {}, result, shares_memory=True)


def _sliced(layout: Layout, own: slice, num_ranks: int) -> tuple[slice, Layout] | None:
    """Return the indices of whole segments in this rank's part, and the layout of these segments."""
    start, stop, step = own.indices(layout.size)
    ends = [0]
    for size in layout.segments:
        ends.append(ends[-1] + size)
    if step != 1 or start >= stop or start not in ends or stop not in ends:
        return None
    chosen = layout.segments[ends.index(start) : ends.index(stop)]
    return slice(start // num_ranks, stop // num_ranks), Layout(layout.dim, chosen)


RULES: dict[Any, Rule] = {
    **dict.fromkeys(functions("cat concat concatenate"), _cat),
    **dict.fromkeys(functions("stack"), _stack),
    **dict.fromkeys(functions("chunk"), _chunk),
    **dict.fromkeys(functions("split"), _split),
    **dict.fromkeys(functions("unbind __iter__"), _unbind),
    **dict.fromkeys(functions("select"), _select),
    **dict.fromkeys(functions("narrow"), _narrow),
    **dict.fromkeys(functions("__getitem__"), _index),
}
"""The rules of functions that take a tensor apart, or put it together."""
