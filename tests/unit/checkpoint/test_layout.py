"""Flat ranges of a tensor as chunks of its shape."""

from itertools import pairwise
from math import prod

import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_paral.checkpoint.layout import Chunk, chunks_of_flat_range, coverage_fault

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
