"""Batches taken from a sampler in chunks equal those that it yields."""

from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler

from lightning_paral.data.batch_slices import BatchTaker, num_samples_in


class FromList:
    """Returns the iterator of its list, like `DistributedSampler`."""

    def __init__(self, indices: list[int]) -> None:
        self.indices = indices

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices)

    def __len__(self) -> int:
        return len(self.indices)


class Delegating(FromList):
    """Yields the same list each time, then different lists, and its own items."""

    def __iter__(self) -> Iterator[int]:
        yield from super().__iter__()
        yield -1
        yield from self.indices[: len(self.indices) // 2]
        yield -2
        yield from FromList(self.indices)


class Own(BatchSampler):
    """A subclass that makes different batches than torch's class."""

    def __iter__(self) -> Iterator[list[int]]:
        for batch in super().__iter__():
            yield batch[::-1]


SAMPLERS: list[Any] = [
    lambda n: SequentialSampler(range(n)),
    lambda n: RandomSampler(range(n)) if n else SequentialSampler(range(n)),
    lambda n: RandomSampler(range(n + 1), num_samples=2 * n + 5),
    lambda n: RandomSampler(range(n + 1), replacement=True, num_samples=n + 40),
    lambda n: SubsetRandomSampler(range(n)),
    lambda n: WeightedRandomSampler([1.0] * (n + 1), n + 1),
    lambda n: FromList(list(range(n))),
    lambda n: Delegating(list(range(n))),
]


@given(
    st.sampled_from(SAMPLERS),
    st.integers(0, 80),
    st.integers(1, 9),
    st.booleans(),
    st.sampled_from([BatchSampler, Own]),
    st.lists(st.integers(0, 12), max_size=8),
)
@settings(deadline=None, max_examples=150)
def test_batches_taken_in_chunks_equal_those_of_the_sampler(make, length, batch_size, drop_last, kind, counts) -> None:
    batches = kind(make(length), batch_size, drop_last)
    torch.manual_seed(5)
    plain = iter(batches)
    expected = [list(islice(plain, count)) for count in [*counts, 1000]]
    after = torch.rand(1)

    torch.manual_seed(5)
    taking = BatchTaker(batches)
    found = [taking.take(count) for count in [*counts, 1000]]

    assert [list(some) for some in found] == expected
    assert torch.equal(torch.rand(1), after)  # no further random numbers were drawn
    for some, those in zip(found, expected, strict=True):
        assert len(some) == len(those)
        assert num_samples_in(some[1:3]) == num_samples_in(those[1:3])


def test_batches_put_back_come_next() -> None:
    taking = BatchTaker(BatchSampler(FromList(list(range(10))), 2, False))
    first = taking.take(3)
    taking.put_back(first)
    assert [list(taking.take(2)), list(taking.take(9))] == [[[0, 1], [2, 3]], [[4, 5], [6, 7], [8, 9]]]
