"""Tensors are divided into parts, and grouped."""

from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_paral.comm.grouping import group_by_dtype_and_device
from lightning_paral.comm.point_to_point import balanced_cuts, num_segments


@given(start=st.integers(0, 100), length=st.integers(0, 10_000), num_parts=st.integers(1, 64))
def test_cuts_cover_the_range_in_parts_that_differ_by_at_most_one(start: int, length: int, num_parts: int) -> None:
    cuts = balanced_cuts(start, length, num_parts)
    sizes = [end - begin for begin, end in pairwise(cuts)]

    assert (cuts[0], cuts[-1]) == (start, start + length)
    assert len(sizes) == num_parts
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1


@given(num_bytes=st.integers(0, 2**34))
def test_messages_are_near_the_target_size(num_bytes: int) -> None:
    num = num_segments(num_bytes, segment_bytes=1024 * 1024)

    assert num >= 1
    assert num_bytes / num <= 1.5 * 1024 * 1024
    assert num == 1 or num_bytes / num >= 0.75 * 1024 * 1024


def test_groups_and_their_members_keep_the_order() -> None:
    tensors = [
        torch.zeros(1),
        torch.zeros(2, dtype=torch.bfloat16),
        torch.zeros(3),
        torch.zeros(4, device="meta"),
        torch.zeros(5, dtype=torch.bfloat16),
    ]

    groups = group_by_dtype_and_device(tensors)

    assert [[tensor.numel() for tensor in group] for group in groups] == [[1, 3], [2, 5], [4]]
