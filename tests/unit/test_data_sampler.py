"""What the ranks of a world draw of an order, without any process: every rank's sampler in this one."""

import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler, WeightedRandomSampler

from lightning_paral.config import Sampling
from lightning_paral.data.order import Order, Seed
from lightning_paral.data.sampler import RankBatchSampler, Share
from lightning_paral.errors import ConfigurationError

lengths, batch_sizes, worlds = st.integers(0, 700), st.integers(1, 9), st.integers(1, 9)
splits = st.sampled_from(["batch", "global"])


def ranks(
    length: int, batch_size: int, world_size: int, split: str, ending: str, shuffle: bool = True
) -> list[RankBatchSampler]:
    """The samplers of all ranks, each with its own copy of the user's."""

    def sampler(rank: int) -> RankBatchSampler:
        # RandomSampler refuses nothing but an empty dataset when it is built.
        indices = RandomSampler(range(length)) if shuffle and length else SequentialSampler(range(length))
        share = Share(rank=rank, world_size=world_size, split=split, ending=ending)
        return RankBatchSampler(Order(BatchSampler(indices, batch_size, False), Seed(7)), share)

    return [sampler(rank) for rank in range(world_size)]


def drawn(sampler: RankBatchSampler) -> list[list[int]]:
    """What a rank draws without its fillers, and in evaluation that is all that counts."""
    return [batch for step, batch in enumerate(sampler) if step not in sampler.fillers]


def in_turns(by_rank: list[list[list[int]]]) -> list[int]:
    steps = max(map(len, by_rank), default=0)
    return [index for step in range(steps) for batches in by_rank for index in (batches[step : step + 1] or [[]])[0]]


@given(lengths, batch_sizes, worlds, splits)
@settings(deadline=None)
def test_evaluation_draws_each_sample_once_in_equally_many_steps(length, batch_size, world_size, split) -> None:
    samplers = ranks(length, batch_size, world_size, split, "fill")

    steps = [sum(1 for _ in sampler) for sampler in samplers]
    samples = [index for sampler in samplers for batch in drawn(sampler) for index in batch]

    assert sorted(samples) == list(range(length))
    assert steps == [len(sampler) for sampler in samplers]
    assert len(set(steps)) == 1


@given(lengths, batch_sizes, worlds, st.sampled_from(["drop", "wrap"]), splits)
@settings(deadline=None)
def test_training_takes_equal_steps_and_repeats_nothing_before_all_is_seen(
    length, batch_size, world_size, ending, split
) -> None:
    samplers = ranks(length, batch_size, world_size, split, ending)
    num_batches = -(-length // batch_size)
    if split == "batch" and ending == "drop" and 0 < num_batches < world_size:
        with pytest.raises(ConfigurationError, match="fewer batches than there are ranks"):
            list(samplers[0])
        return

    by_rank = [list(sampler) for sampler in samplers]
    weighted = [[batch for step, batch in enumerate(sampler) if sampler.loss_weights.get(step) != 0.0]
                for sampler in samplers for _ in [sampler.order.set_epoch(0), setattr(sampler, "_repetition", 0)][:0] or [0]]

    assert len({len(batches) for batches in by_rank}) == 1
    order = in_turns(by_rank)
    seen = list(dict.fromkeys(order))
    if ending == "wrap" or split == "global":
        assert sorted(seen) == list(range(length))
    assert sorted(order[: len(seen)]) == sorted(seen) or split == "global"
    del weighted
