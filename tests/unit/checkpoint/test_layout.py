"""Flat ranges of a tensor as chunks of its shape."""

from itertools import pairwise
from math import prod

import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_paral.checkpoint.layout import (
    Chunk,
    balanced_range,
    chunks_of_flat_range,
    coverage_fault,
    flat_range_of,
    intersection,
)

shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@st.composite
def flat_ranges(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int]:
    shape = draw(shapes)
    start = draw(st.integers(0, prod(shape)))
    return shape, start, draw(st.integers(start, prod(shape)))


@st.composite
def divisions(draw: st.DrawFn) -> tuple[tuple[int, ...], list[int]]:
    shape = draw(shapes)
    cuts = draw(st.lists(st.integers(0, prod(shape)), max_size=4))
    return shape, sorted([0, *cuts, prod(shape)])


@st.composite
def chunks(draw: st.DrawFn, shape: tuple[int, ...]) -> Chunk:
    offsets = tuple(draw(st.integers(0, max(0, size - 1))) for size in shape)
    return Chunk(offsets, tuple(draw(st.integers(0, size - o)) for size, o in zip(shape, offsets, strict=True)))


@given(flat_ranges())
def test_chunks_hold_the_elements_of_a_flat_range_in_their_order(flat_range) -> None:
    shape, start, stop = flat_range
    elements = torch.arange(prod(shape)).view(shape)
    found = [elements[chunk.index].flatten() for chunk in chunks_of_flat_range(shape, start, stop)]
    assert torch.cat([*found, elements.new_empty(0)]).tolist() == list(range(start, stop))


@given(flat_ranges())
def test_chunks_are_few_and_each_contiguous_in_memory(flat_range) -> None:
    shape, start, stop = flat_range
    elements = torch.zeros(shape)
    found = chunks_of_flat_range(shape, start, stop)
    assert len(found) <= max(1, 2 * len(shape) - 1)
    assert all(elements[chunk.index].is_contiguous() for chunk in found)


@given(divisions())
def test_flat_ranges_of_a_division_cover_the_tensor_once(division) -> None:
    shape, cuts = division
    found = [chunk for a, b in pairwise(cuts) for chunk in chunks_of_flat_range(shape, a, b)]
    assert coverage_fault(shape, found) is None


@given(st.data())
def test_coverage_agrees_with_counting_elements(data) -> None:
    shape = data.draw(shapes)
    found = data.draw(st.lists(chunks(shape), max_size=5))
    count = torch.zeros(shape)
    for chunk in found:
        count[chunk.index] += 1
    assert (coverage_fault(shape, found) is None) == bool((count == 1).all())


def test_chunk_out_of_bounds_is_a_fault() -> None:
    assert "outside" in (coverage_fault((2, 3), [Chunk((0, 0), (2, 4))]) or "")


@given(st.data())
def test_intersection_has_the_common_elements(data) -> None:
    shape = data.draw(shapes)
    first, second = data.draw(chunks(shape)), data.draw(chunks(shape))
    inside = torch.zeros(2, *shape, dtype=torch.bool)
    inside[0][first.index] = True
    inside[1][second.index] = True
    common = torch.zeros(shape, dtype=torch.bool)
    both = intersection(first, second)
    if both is not None:
        common[both.index] = True
    assert torch.equal(common, inside.all(dim=0))


@given(st.lists(st.tuples(st.integers(0, 20), st.sampled_from([1, 2, 4, 8])), max_size=6), st.integers(1, 5))
def test_balanced_ranges_divide_every_tensor_among_the_ranks(tensors, world_size) -> None:
    nbytes = sum(numel * itemsize for numel, itemsize in tensors)
    position = 0
    for numel, itemsize in tensors:
        written = []
        for rank in range(world_size):
            start, stop = balanced_range(rank, world_size, nbytes, position, itemsize)
            written += range(min(start, numel), min(stop, numel))
        assert written == list(range(numel))
        position += numel * itemsize


@given(st.integers(0, 1000), st.integers(1, 7))
def test_shares_are_equal(numel, world_size) -> None:
    sizes = []
    for rank in range(world_size):
        start, stop = balanced_range(rank, world_size, 4 * numel, 0, 4)
        sizes.append(min(stop, numel) - min(start, numel))
    assert max(sizes) - min(sizes) <= 1


@given(st.data())
def test_chunk_is_a_flat_range_if_it_is_contiguous(data) -> None:
    shape = data.draw(shapes)
    chunk = data.draw(chunks(shape))
    numbers = torch.arange(prod(shape)).view(shape)[chunk.index].flatten().tolist()
    follow = numbers and numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    assert flat_range_of(shape, chunk) == ((numbers[0], numbers[-1] + 1) if follow else None)
