"""Each rank draws its batches of a global order. The samplers of all ranks are in one process."""

import random
import warnings
from collections.abc import Iterator
from itertools import cycle, islice
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler

from lightning_paral.data.sampler import GlobalOrder, RankBatchSampler, Seed, ShardSpec
from lightning_paral.errors import ConfigurationError

lengths, batch_sizes, worlds = st.integers(0, 700), st.integers(1, 9), st.integers(1, 9)
splits, remainders = st.sampled_from(["batch", "global"]), st.sampled_from(["drop", "wrap"])
exactly = settings(deadline=None, max_examples=60)


def sampler_of(rank: int, world_size: int, split: str, remainder: str, batches: Any) -> RankBatchSampler:
    shard = ShardSpec(data_rank=rank, data_size=world_size, split=split, remainder=remainder)
    return RankBatchSampler(GlobalOrder(batches, Seed(7), samplers=(batches, getattr(batches, "sampler", None))), shard)


def padding_steps(sampler: RankBatchSampler) -> set[int]:
    return {step for step, mark in sampler.marks.items() if mark.is_padding}


def batches_of(length: int, batch_size: int) -> BatchSampler:
    indices = RandomSampler(range(length)) if length else SequentialSampler(range(length))
    return BatchSampler(indices, batch_size, drop_last=False)


def all_ranks(length: int, batch_size: int, world_size: int, split: str, remainder: str) -> list[RankBatchSampler]:
    return [
        sampler_of(rank, world_size, split, remainder, batches_of(length, batch_size)) for rank in range(world_size)
    ]


def one_process(length: int, batch_size: int) -> list[list[int]]:
    return list(sampler_of(0, 1, "batch", "wrap", batches_of(length, batch_size)))


@given(lengths, batch_sizes, worlds, splits)
@exactly
def test_evaluation_draws_each_sample_once_in_equally_many_steps(length, batch_size, world_size, split) -> None:
    samplers = all_ranks(length, batch_size, world_size, split, "pad")

    by_rank = [list(sampler) for sampler in samplers]

    counted = [
        index
        for sampler, batches in zip(samplers, by_rank, strict=True)
        for step, batch in enumerate(batches)
        if step not in padding_steps(sampler)
        for index in batch
    ]
    assert sorted(counted) == list(range(length))
    assert {len(batches) for batches in by_rank} == {len(samplers[0])}
    padded = set().union(*(padding_steps(sampler) for sampler in samplers))
    for sampler in samplers:
        assert {step for step, mark in sampler.marks.items() if mark.some_have_none} == padded


@given(lengths, batch_sizes, worlds, remainders)
@exactly
def test_full_batches_in_turn_equal_those_of_one_process(length, batch_size, world_size, remainder) -> None:
    expected = one_process(length, batch_size)
    samplers = all_ranks(length, batch_size, world_size, "batch", remainder)
    if remainder == "drop" and 0 < len(expected) < world_size:
        with pytest.raises(ConfigurationError, match="fewer batches than there are ranks"):
            list(samplers[0])
        return

    by_rank = [list(sampler) for sampler in samplers]

    num_steps = len(samplers[0])
    assert [len(batches) for batches in by_rank] == [num_steps] * world_size
    if remainder == "drop":
        expected = expected[: num_steps * world_size]
    else:  # no batch is repeated before all are drawn once
        expected = list(islice(cycle(expected), num_steps * world_size)) if expected else []
    assert [batches[step] for step in range(num_steps) for batches in by_rank] == expected


@given(lengths, batch_sizes, worlds, remainders)
@exactly
def test_parts_of_global_batches_join_to_those_of_one_process(length, batch_size, world_size, remainder) -> None:
    expected = one_process(length, batch_size)
    samplers = all_ranks(length, batch_size, world_size, "global", remainder)

    by_rank = [list(sampler) for sampler in samplers]

    assert [len(batches) for batches in by_rank] == [len(expected)] * world_size
    for step, batch in enumerate(expected):
        weights = [sampler.marks[step].weight if step in sampler.marks else 1.0 for sampler in samplers]
        parts = [batches[step] for batches, weight in zip(by_rank, weights, strict=True) if weight]
        assert sorted(index for part in parts for index in part) == sorted(batch)
        assert all(batches[step] for batches in by_rank)
        # The mean over ranks of weighted means is the mean over the batch.
        means = [weight * np.mean(batches[step]) for batches, weight in zip(by_rank, weights, strict=True)]
        assert np.isclose(np.mean(means), np.mean(batch))


@given(st.integers(1, 700), batch_sizes, worlds, worlds, splits, st.data())
@exactly
def test_resuming_draws_the_remaining_samples_at_any_world_size(
    length, batch_size, saving, resuming, split, data
) -> None:
    expected = [index for batch in one_process(length, batch_size) for index in batch]
    saved = all_ranks(length, batch_size, saving, split, "wrap")[0]
    num_steps = data.draw(st.integers(0, len(saved)))
    drawn = iter(saved)
    for _ in range(num_steps):
        next(drawn)
    position = saved.position(num_steps)

    samplers = all_ranks(length, batch_size, resuming, split, "pad")
    starts = {sampler.resume(0, position, num_steps) for sampler in samplers}
    by_rank = [list(sampler) for sampler in samplers]

    assert len(starts) == 1
    assert {len(batches) for batches in by_rank} == {len(samplers[0]) - starts.pop()}
    left = [
        index
        for sampler, batches in zip(samplers, by_rank, strict=True)
        for step, batch in enumerate(batches, len(samplers[0]) - len(batches))
        if step not in padding_steps(sampler)
        for index in batch
    ]
    assert sorted(left) == sorted(expected[position["samples"] :])


class Bucketing:
    """Yields batches of different sizes, drawn from all three global generators, and has no length."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        left = torch.randperm(self.length).tolist()
        while left:
            size = random.randint(1, 3) + int(np.random.randint(3))
            yield left[:size]
            left = left[size:]


@pytest.mark.parametrize("split", ["batch", "global"])
def test_ranks_draw_equally_from_samplers_that_depend_on_generators_only(split) -> None:
    samplers = [sampler_of(rank, 3, split, "pad", Bucketing(1000)) for rank in range(3)]
    samples = []
    for rank, sampler in enumerate(samplers):
        torch.manual_seed(rank), np.random.seed(rank), random.seed(rank)
        for step, batch in enumerate(sampler):
            torch.rand(rank + 1), np.random.rand(2), random.random()  # training draws from the generators as well
            samples += batch if step not in padding_steps(sampler) else []

    assert sorted(samples) == list(range(1000))
    with pytest.raises(TypeError, match="Bucketing has no length"):
        len(samplers[0])


def test_drawing_restores_the_generators() -> None:
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    generator = torch.Generator().manual_seed(3)
    own = generator.get_state()
    batches = BatchSampler(RandomSampler(range(5000), generator=generator), 2, False)

    drawn = list(sampler_of(0, 2, "batch", "wrap", batches))

    assert torch.equal(torch.get_rng_state(), states[0])
    assert all(np.array_equal(one, other) for one, other in zip(np.random.get_state(), states[1], strict=True))
    assert random.getstate() == states[2]
    assert torch.equal(generator.get_state(), own)
    assert drawn == list(sampler_of(0, 2, "batch", "wrap", batches))
    generator.manual_seed(4)
    assert drawn != list(sampler_of(0, 2, "batch", "wrap", batches))


def test_order_differs_by_epoch_repetition_and_loader() -> None:
    sampler = sampler_of(0, 2, "batch", "wrap", batches_of(100, 5))
    first, repeated = list(sampler), list(sampler)
    sampler.set_epoch(1)
    second = list(sampler)
    sampler.set_epoch(0)
    sampler.order.loader_index = 1
    of_another_loader = list(sampler)

    orders = [first, repeated, second, of_another_loader]
    assert all(one != other for index, one in enumerate(orders) for other in orders[:index])
    assert sampler.sampler is sampler


def test_batch_with_fewer_samples_than_ranks_is_reported_once_in_training() -> None:
    training = sampler_of(1, 4, "global", "wrap", BatchSampler(SequentialSampler(range(10)), 4, drop_last=False))
    with pytest.warns(UserWarning, match="fewer samples than there are ranks, 2 for 4.*Set drop_last=True") as warned:
        assert [list(training), list(training)] == [[[1], [5], [9]]] * 2
    assert len(warned) == 1

    evaluation = sampler_of(1, 4, "global", "pad", BatchSampler(SequentialSampler(range(10)), 4, drop_last=False))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        list(evaluation)
