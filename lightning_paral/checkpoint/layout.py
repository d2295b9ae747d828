"""Boxes of a tensor, and the runs of its flattened elements that ranks hold."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

_MAX_COMPARED = 500_000
"""Pairs of boxes of one tensor: about a second. Of 4,096 ranks in a square there are 130,000."""


@dataclass(frozen=True)
class Box:
    """An axis-aligned part of a tensor: `offsets[d] <= index[d] < offsets[d] + sizes[d]` in each dimension d."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements; 1 for the box of a 0-dimensional tensor."""
        return prod(self.sizes)

    @property
    def index(self) -> tuple[slice, ...]:
        """What `tensor[...]` takes to get this box."""
        return tuple(slice(start, start + size) for start, size in zip(self.offsets, self.sizes, strict=True))

    def seen_from(self, outer: "Box") -> "Box":
        """Return this box with offsets counted from the corner of `outer`."""
        return Box(tuple(a - b for a, b in zip(self.offsets, outer.offsets, strict=True)), self.sizes)


def whole(shape: Sequence[int]) -> Box:
    """Return the box of all elements."""
    return Box((0,) * len(shape), tuple(shape))


def intersection(first: Box, second: Box) -> Box | None:
    """Return what both boxes hold; `None` if that is nothing."""
    starts = [max(a, b) for a, b in zip(first.offsets, second.offsets, strict=True)]
    stops = [
        min(a + m, b + n) for a, m, b, n in zip(first.offsets, first.sizes, second.offsets, second.sizes, strict=True)
    ]
    sizes = tuple(stop - start for start, stop in zip(starts, stops, strict=True))
    return Box(tuple(starts), sizes) if all(size > 0 for size in sizes) else None


def boxes_of_run(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """Return the elements `[start, stop)` of a row-major tensor as boxes, in their order in memory.

    There are at most `2 * len(shape) - 1` of them, each contiguous in memory.
    """
    if start >= stop:
        return []
    if not shape:
        return [Box((), ())]
    row = prod(shape[1:])
    first, head = divmod(start, row)
    last, tail = divmod(stop, row)
    if first == last:
        return _in_row(shape, first, head, tail)
    boxes = []
    if head:
        boxes += _in_row(shape, first, head, row)
        first += 1
    if first < last:
        boxes.append(Box((first, *(0 for _ in shape[1:])), (last - first, *shape[1:])))
    return boxes + _in_row(shape, last, 0, tail)


def _in_row(shape: Sequence[int], row: int, start: int, stop: int) -> list[Box]:
    return [Box((row, *box.offsets), (1, *box.sizes)) for box in boxes_of_run(shape[1:], start, stop)]


def run_of_box(shape: Sequence[int], box: Box) -> tuple[int, int] | None:
    """Return the elements `[start, stop)` of a row-major tensor that `box` holds; `None` if they are not in a row."""
    start = 0
    for size, offset in zip(shape, box.offsets, strict=True):
        start = start * size + offset
    return (start, start + box.numel) if boxes_of_run(shape, start, start + box.numel) == [box] else None


def share_of(rank: int, world_size: int, nbytes: int, position: int, itemsize: int) -> tuple[int, int]:
    """Return which elements of a tensor `rank` writes, as `[start, stop)`, where all ranks hold all tensors.

    The tensors are thought of as one sequence of `nbytes` bytes, cut into `world_size` equal parts at element borders.
    This one begins at byte `position`; clip the result to its number of elements.
    """
    low, high = nbytes * rank // world_size, nbytes * (rank + 1) // world_size
    return max(0, -((position - low) // itemsize)), max(0, -((position - high) // itemsize))


def coverage_fault(shape: Sequence[int], boxes: Sequence[Box]) -> str | None:
    """Say what is wrong if `boxes` are not a division of a tensor: out of bounds, overlap or hole; else `None`."""
    everything = whole(shape)
    for box in boxes:
        if len(box.sizes) != len(shape) or (box.numel and intersection(box, everything) != box):
            return f"box {box.offsets}+{box.sizes} lies outside of shape {tuple(shape)}"
    filled = [box for box in boxes if box.numel]
    # Along the dimension that is cut most often few boxes meet.
    most = max(range(len(shape)), key=lambda dim: len({box.offsets[dim] for box in filled}), default=0)
    filled.sort(key=lambda box: box.offsets[most : most + 1])
    compared = 0
    for number, box in enumerate(filled):
        for following in range(number + 1, len(filled)):
            other = filled[following]
            if shape and other.offsets[most] >= box.offsets[most] + box.sizes[most]:
                break  # sorted by this offset: none after this one can meet it
            if intersection(box, other) is not None:
                return f"boxes {box.offsets}+{box.sizes} and {other.offsets}+{other.sizes} overlap"
            compared += 1
            if compared > _MAX_COMPARED:
                return f"its {len(filled)} boxes are cut so that they cannot be checked"
    missing = prod(shape) - sum(box.numel for box in filled)
    return f"{missing} of {prod(shape)} elements are in no box" if missing else None
