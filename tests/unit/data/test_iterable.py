"""Each sample of a stream goes to one rank and worker. All ranks are simulated in one process."""

from collections.abc import Iterator
from statistics import mean

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset

from lightning_paral.data.iterable import distribute_iterable
from lightning_paral.data.loaders import Marked
from lightning_paral.data.sampler import Mark, Seed, ShardSpec
from lightning_paral.errors import ConfigurationError

exactly = settings(deadline=None, max_examples=60)
lengths, worlds = st.integers(0, 120), st.integers(1, 5)


class Stream(IterableDataset[int]):
    """Has no length, and shuffles from the global generator during iteration."""

    def __init__(self, length: int, shuffle: bool = False) -> None:
        self.length = length
        self.shuffle = shuffle

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(self.length).tolist() if self.shuffle else range(self.length)
        for index in order:
            if self.shuffle:
                torch.rand(1)
            yield index


class Sized(Stream):
    def __len__(self) -> int:
        return self.length


def loaders(
    dataset: Stream, batch_size: int | None, world_size: int, split: str, remainder: str, **options: object
) -> list[DataLoader[int]]:
    """Return the loader of each rank."""
    made = []
    for rank in range(world_size):
        shard = ShardSpec(data_rank=rank, data_size=world_size, split=split, remainder=remainder)
        made.append(distribute_iterable(DataLoader(dataset, batch_size, **options), shard, Seed(5), 0)[0])
    return made


def counted(batches: list[object]) -> list[list[int]]:
    """Return the batches without padding."""
    users = [batch.batch if isinstance(batch, Marked) else batch for batch in batches if not is_padding(batch)]
    return [batch.tolist() for batch in users]


def is_padding(batch: object) -> bool:
    return isinstance(batch, Marked) and batch.mark.is_padding


@given(lengths, st.integers(1, 5), worlds, st.sampled_from(["batch", "global"]), st.booleans())
@exactly
def test_evaluation_reads_each_sample_once_in_equally_many_steps(length, batch_size, world_size, split, drop_last):
    batch_size = batch_size * world_size if split == "global" else batch_size

    by_rank = [
        list(loader) for loader in loaders(Stream(length), batch_size, world_size, split, "pad", drop_last=drop_last)
    ]

    kept = length - length % batch_size if drop_last else length
    samples = [sample for batches in by_rank for batch in counted(batches) for sample in batch]
    assert sorted(samples) == list(range(kept))
    assert len({len(batches) for batches in by_rank}) == 1


@given(lengths, st.integers(1, 5), worlds, st.sampled_from(["drop", "wrap"]), st.booleans())
@exactly
def test_training_takes_full_batches_in_turn_and_equal_steps(length, batch_size, world_size, remainder, shuffle):
    made = loaders(Sized(length, shuffle), batch_size, world_size, "batch", remainder)
    (one,) = loaders(Stream(length, shuffle), batch_size, 1, "batch", "wrap")
    expected = [batch.tolist() for batch in one]
    if remainder == "drop" and 0 < len(expected) < world_size:
        with pytest.raises(ConfigurationError, match="Sized has fewer batches than there are ranks"):
            list(made[0])
        return

    by_rank = [[batch.tolist() for batch in loader] for loader in made]

    num_steps = len(made[0])
    assert {len(batches) for batches in by_rank} == {num_steps}
    turns = [batches[step] for step in range(num_steps) for batches in by_rank]
    common = min(len(turns), len(expected))
    assert turns[:common] == expected[:common]
    assert len(expected) - common < world_size if remainder == "drop" else common == len(expected)


@given(lengths, st.integers(1, 3), worlds)
@exactly
def test_parts_of_global_batches_join_to_the_stream(length, multiple, world_size):
    made = loaders(Stream(length), multiple * world_size, world_size, "global", "wrap")

    by_rank = [[batch.tolist() for batch in loader] for loader in made]

    size = multiple * world_size
    expected = [list(range(start, min(start + size, length))) for start in range(0, length, size)]
    assert {len(batches) for batches in by_rank} == {len(expected)}
    for step, batch in enumerate(expected):
        marks = [loader.dataset.marks.get(step, Mark()) for loader in made]
        weights = [mark.weight for mark in marks]
        parts = [batches[step] for batches, weight in zip(by_rank, weights, strict=True) if weight]
        assert sorted(sample for part in parts for sample in part) == batch
        assert all(batches[step] for batches in by_rank)
        # The mean over ranks of weighted means is the mean over the batch.
        means = [weight * mean(batches[step]) for batches, weight in zip(by_rank, weights, strict=True)]
        assert mean(means) == pytest.approx(mean(batch))
        assert len({(mark.num_samples, mark.first) for mark in marks}) == 1
    assert {loader.batch_size for loader in made} == {multiple}


def test_workers_share_the_steps_and_keep_the_order_of_one() -> None:
    for batch_size in (3, None):
        alone = loaders(Stream(25, shuffle=True), batch_size, 2, "batch", "wrap")
        helped = loaders(Stream(25, shuffle=True), batch_size, 2, "batch", "wrap", num_workers=2)
        kept = loaders(Stream(25, shuffle=True), batch_size, 2, "batch", "wrap", num_workers=2, persistent_workers=True)
        for one, several, persistent in zip(alone, helped, kept, strict=True):
            first = [torch.as_tensor(batch).tolist() for batch in one]
            assert [torch.as_tensor(batch).tolist() for batch in several] == first
            assert [torch.as_tensor(batch).tolist() for batch in persistent] == first
            assert [torch.as_tensor(batch).tolist() for batch in persistent] != first


def test_stream_resumes_after_the_samples_seen() -> None:
    (one,) = loaders(Stream(30, shuffle=True), 4, 1, "batch", "wrap")
    whole = [sample for batch in one for sample in batch.tolist()]
    for world_size in (1, 2, 3):
        resumed = loaders(Stream(30, shuffle=True), 4, world_size, "batch", "pad")
        for loader in resumed:
            loader.dataset.resume(0, {"samples": 8})
        samples = [sample for loader in resumed for batch in counted(list(loader)) for sample in batch]
        assert sorted(samples) == sorted(whole[8:])
