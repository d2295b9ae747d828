"""Every kind of loader is divided correctly under a real Trainer with real ranks: which samples each rank draws."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    DistributedSampler,
    Sampler,
    Subset,
    WeightedRandomSampler,
    random_split,
)
from torch.utils.data.datapipes.iter import IterableWrapper

from lightning_paral import ConfigurationError
from tests.models.recorded import Indices, Recorder, Stream, fit, flat, trainer_of
from tests.running import SaveAt

WORKER = {"num_workers": 1, "multiprocessing_context": "fork"}


class OwnLoader(DataLoader[float]):
    """A user's loader whose constructor has no sampler argument, and which changes loaded batches."""

    def __init__(self, length: int, offset: float) -> None:
        super().__init__(Indices(length), batch_size=2)
        self.offset = offset

    def __iter__(self) -> Iterator[Any]:
        for batch in super().__iter__():
            yield batch + self.offset


class Buckets(Sampler[list[int]]):
    """A batch sampler with batches of unequal sizes, no length, and a constructor unlike those of torch."""

    def __init__(self, *, sizes: list[int]) -> None:
        self.sizes = sizes

    def __iter__(self) -> Iterator[list[int]]:
        start = 0
        for size in self.sizes:
            yield list(range(start, start + size))
            start += size


# Training

Rows = tuple[Callable[[], Any], dict[str, Any], Any]
"""A function that returns a loader, options of `fit`, and what is expected."""


def in_order(length: int = 10, **options: Any) -> Callable[[], Any]:
    return lambda: DataLoader(Indices(length), 2, **options)


def buckets() -> Any:
    return DataLoader(Indices(10), batch_sampler=Buckets(sizes=[1, 4, 2, 3]))


def distributed() -> Any:
    return DataLoader(Indices(8), 2, sampler=DistributedSampler(Indices(8), 2, dist.get_rank(), shuffle=False))


def data_pipe() -> Any:
    return DataLoader(IterableWrapper(list(range(8))).sharding_filter(), 2)


def divided() -> Any:
    return DataLoader(Stream(5, divided=True), 1)


WHOLE = [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]
ORDERED: dict[str, Rows] = {
    "sequential": (in_order(), {}, ([[0, 1], [4, 5], [8, 9]], [[2, 3], [6, 7], [0, 1]])),
    "drop": (in_order(), {"remainder": "drop"}, ([[0, 1], [4, 5]], [[2, 3], [6, 7]])),
    "limited": (in_order(), {"limit_train_batches": 2}, ([[0, 1], [4, 5]], [[2, 3], [6, 7]])),
    "not wanted": (in_order(), {"use_distributed_sampler": False}, (WHOLE, WHOLE)),
    "own class": (lambda: OwnLoader(8, 0.5), {}, ([[0.5, 1.5], [4.5, 5.5]], [[2.5, 3.5], [6.5, 7.5]])),
    "buckets": (buckets, {}, ([[0], [5, 6]], [[1, 2, 3, 4], [7, 8, 9]])),
    # The first batch has one sample, so the other rank takes it as well, with weight zero.
    "buckets, global": (buckets, {"split": "global"}, ([[0], [2, 4], [6], [8]], [[0], [1, 3], [5], [7, 9]])),
    "no batch size": (lambda: DataLoader(Indices(6), batch_size=None), {}, ([0, 2, 4], [1, 3, 5])),
    "differing, not wanted": (
        lambda: DataLoader(Indices(2 + 2 * dist.get_rank()), 4),
        {"use_distributed_sampler": False},
        ([[0, 1]], [[0, 1, 2, 3]]),
    ),
    "distributed already": (distributed, {}, ([[0, 2], [4, 6]], [[1, 3], [5, 7]])),
    "overfit": (
        in_order(12, shuffle=True),
        {"overfit_batches": 2, "max_epochs": 2},
        ([[0, 1], [4, 5]] * 2, [[2, 3], [6, 7]] * 2),
    ),
    "stream": (lambda: DataLoader(Stream(9), 2), {}, ([[0, 1], [4, 5], [8]], [[2, 3], [6, 7], [8]])),
    "data pipe": (data_pipe, {}, ([[0, 1], [4, 5]], [[2, 3], [6, 7]])),
    "stream, drop": (lambda: DataLoader(Stream(9), 2), {"remainder": "drop"}, ([[0, 1], [4, 5]], [[2, 3], [6, 7]])),
    "stream, global": (
        lambda: DataLoader(Stream(8), 4),
        {"split": "global", "max_epochs": 2},
        ([[0, 2], [4, 6]] * 2, [[1, 3], [5, 7]] * 2),
    ),
    "divided, drop": (divided, {"shard_iterable": False, "remainder": "drop"}, ([[0], [2]], [[1], [3]])),
    "divided, wrap": (divided, {"shard_iterable": False}, ([[0], [2], [4]], [[1], [3], [1]])),
}


def trained(rows: dict[str, Rows], name: str) -> list[Any]:
    make, options, _ = rows[name]
    return fit(make(), **options).trained


def trained_in_order(name: str) -> list[Any]:
    return trained(ORDERED, name)


@pytest.mark.parametrize("name", ORDERED)
def test_each_rank_trains_on_its_batches_in_order(on_ranks, name: str) -> None:
    assert tuple(on_ranks(2, trained_in_order, name)) == ORDERED[name][-1]


def weighted() -> Any:
    sampler = WeightedRandomSampler([1.0] * 12, 12, replacement=False)
    return DataLoader(Indices(12), 3, sampler=sampler, drop_last=True)


SHUFFLED: dict[str, Rows] = {
    "shuffled": (in_order(12, shuffle=True), {}, 1),
    "weighted": (weighted, {}, 1),
    "workers": (in_order(8, shuffle=True, persistent_workers=True, **WORKER), {"max_epochs": 3}, 3),
    "by steps": (in_order(12, shuffle=True), {"max_steps": 6, "max_epochs": -1}, 2),
}
"""Loader, options and number of epochs."""


def trained_shuffled(name: str) -> list[Any]:
    """Return the samples of two fits with one loader."""
    torch.manual_seed(dist.get_rank())  # ranks agree on the order although their generators differ
    make, options, _ = SHUFFLED[name]
    loader = make()
    return [fit(loader, **options).trained for _ in range(2)]


def assert_new_order_in_each_epoch(ranks: Any, num_epochs: int) -> None:
    num_steps = len(ranks[0]) // num_epochs
    epochs = [
        flat([rank[num_steps * epoch : num_steps * (epoch + 1)] for rank in ranks]) for epoch in range(num_epochs)
    ]
    for epoch in epochs:
        assert sorted(epoch) == list(range(len(epoch))) != epoch
    assert len({tuple(epoch) for epoch in epochs}) == num_epochs


@pytest.mark.parametrize("name", SHUFFLED)
def test_ranks_draw_every_sample_once_in_an_epoch(on_ranks, name: str) -> None:
    for ranks in zip(*on_ranks(2, trained_shuffled, name), strict=True):
        assert_new_order_in_each_epoch(ranks, SHUFFLED[name][-1])


def trained_on_several(cycled: bool) -> list[Any]:
    shuffled = DataLoader(Indices(4 if cycled else 8), 1, shuffle=True)
    if cycled:
        return fit([DataLoader(Indices(8), 2), shuffled]).trained
    return fit(CombinedLoader([DataLoader(Indices(8), 1, shuffle=True), shuffled], "min_size")).trained


def test_combined_loaders_draw_like_one_process(on_ranks) -> None:
    first, second = on_ranks(2, trained_on_several, False)
    ones, others = (flat([pair[place] for pair in first + second]) for place in (0, 1))
    assert sorted(ones) == sorted(others) == list(range(8))
    assert ones != others

    first, second = on_ranks(2, trained_on_several, True)
    assert flat([one for one, _ in first]) == [0, 1, 4, 5]
    assert sorted(flat([other for _, other in first + second])) == [0, 1, 2, 3]


# Resuming inside an epoch


def interrupt(folder: str) -> None:
    """Save after 3 steps, that is 12 samples, of each kind of loader."""
    for name, loader, split in (
        ("indices", DataLoader(Indices(20), 2), "batch"),
        ("stream", DataLoader(Stream(20), 2), "batch"),
        ("global", DataLoader(Indices(24), 4, shuffle=True), "global"),
    ):
        fit(loader, split=split, callbacks=[SaveAt(3, f"{folder}/{name}.ckpt")], max_steps=3, max_epochs=-1)


def resume(folder: str) -> dict[str, Any]:
    def run(name: str, loader: Any, **options: Any) -> Any:
        return fit(loader, ckpt_path=f"{folder}/{name}.ckpt", **options).trained

    stream_of_workers: Any = DataLoader(Stream(20), 2, persistent_workers=True, **WORKER)
    return {
        "indices": run("indices", DataLoader(Indices(20, num_seen=12), 2)),
        "by steps": run("indices", DataLoader(Indices(20), 2), max_steps=7, max_epochs=-1),
        "workers": run("indices", DataLoader(Indices(20, num_seen=12), 2, **WORKER)),
        "stream": run("stream", DataLoader(Stream(20), 2), max_epochs=2),
        "stream, workers": run("stream", stream_of_workers, max_epochs=2),
        "global": run("global", DataLoader(Indices(24), 4, shuffle=True), split="global"),
    }


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_resuming_skips_the_samples_seen_at_any_world_size(on_ranks, tmp_path, world_size: int) -> None:
    on_ranks(2, interrupt, str(tmp_path))

    ranks = on_ranks(world_size, resume, str(tmp_path))

    # 8 of 20 samples of the first epoch remain: 4 batches of 10.
    first, whole = -(-4 // world_size), -(-10 // world_size)
    for rank in ranks:
        assert len(rank["indices"]) == len(rank["workers"]) == first
        assert len(rank["by steps"]) == 4
        assert len(rank["stream"]) == len(rank["stream, workers"]) == first + whole
        assert len(rank["global"]) == 3
    for name in ("indices", "workers", "stream", "stream, workers"):
        assert set(flat([rank[name][:first] for rank in ranks])) == set(range(12, 20)), name
    assert set(flat([rank["stream"][first:] for rank in ranks])) == set(range(20))
    assert len(set(flat([rank["global"] for rank in ranks]))) == 12


def saved_seeds(folder: str) -> list[int | None]:
    """Return the seeds of orders in checkpoints saved after an evaluation, a fit, and another evaluation."""
    model, loader, trainer = Recorder(), DataLoader(Indices(8), batch_size=2), trainer_of()
    seeds = []
    for seed, run in enumerate((trainer.validate, trainer.fit, trainer.validate)):
        torch.manual_seed(seed)
        run(model, loader)
        trainer.save_checkpoint(f"{folder}/{seed}.ckpt")
        saved = torch.load(f"{folder}/{seed}.ckpt", weights_only=False)
        seeds.append(saved["lightning_paral.data"]["seed"] if "lightning_paral.data" in saved else None)
    return seeds


def test_a_checkpoint_has_the_position_of_the_last_fit(on_ranks, tmp_path) -> None:
    assert on_ranks(2, saved_seeds, str(tmp_path)) == [[None, 1, 1]] * 2


# Bad input


class LooksAtTheRank(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(dist.get_rank(), 8))

    def __len__(self) -> int:
        return 8


def differing(kind: str) -> Callable[[], Any]:
    """Return a function that returns a loader whose dataset differs between ranks."""

    def make() -> Any:
        rank, numbers = dist.get_rank(), Indices(16)
        if kind == "length":
            return DataLoader(Indices(16 + 4 * rank), 4)
        if kind == "split":
            return DataLoader(random_split(numbers, [12, 4], generator=torch.Generator().manual_seed(rank))[0], 4)
        return DataLoader(ConcatDataset([Subset(numbers, range(12)), Subset(numbers, [0, 1, 2, 3, 4 + rank])]), 4)

    return make


DIFFERENT = "The LooksAtTheRank first draws [[0, 1], [2, 3], [4, 5], [6, 7]] on rank 0 and [[1, 2],"
TOO_FEW = "has fewer batches than there are ranks, 2"
REFUSED: dict[str, Rows] = {
    "orders differ": (lambda: DataLoader(Indices(8), 2, sampler=LooksAtTheRank()), {}, DIFFERENT),
    "length": (differing("length"), {}, "The loader's Indices has length 16 on rank 0 and 20 on rank 1"),
    "split": (differing("split"), {}, "The loader's Subset has indices ["),
    "nested": (differing("nested"), {}, "ConcatDataset, its Subset 1 has indices [0, 1, 2, 3, 4]"),
    "one batch": (in_order(2), {"remainder": "drop"}, TOO_FEW),
    "one bucket": (
        lambda: DataLoader(Indices(2), batch_sampler=Buckets(sizes=[2])),
        {"remainder": "drop"},
        TOO_FEW,
    ),
    "one batch of a stream": (lambda: DataLoader(Stream(2), 2), {"remainder": "drop"}, TOO_FEW),
    "small": (lambda: DataLoader(Indices(8), 1), {"split": "global"}, "batch_size=1"),
    "unbatched": (lambda: DataLoader(Indices(8), None), {"split": "global"}, "batch_size=None"),
    "indivisible": (lambda: DataLoader(Stream(8), 3), {"split": "global"}, "batch_size=3"),
}


def refusal(name: str) -> str:
    with pytest.raises(ConfigurationError) as raised:
        trained(REFUSED, name)
    return str(raised.value)


@pytest.mark.parametrize("name", REFUSED)
def test_invalid_loaders_are_named_on_every_rank(on_ranks, name: str) -> None:
    assert all(REFUSED[name][-1] in message for message in on_ranks(2, refusal, name))


# Cost


def count_collectives(num_batches: int) -> dict[str, int]:
    """Count the calls into torch.distributed while training and evaluating."""
    calls: dict[str, int] = {}

    def counted(name: str) -> Any:
        original = getattr(dist, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            calls[name] = calls.get(name, 0) + 1
            return original(*args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in ("all_reduce", "all_gather", "all_gather_object", "broadcast", "barrier", "broadcast_object_list"):
            patch.setattr(dist, name, counted(name))
        fit(DataLoader(Indices(num_batches * 2), 1), DataLoader(Indices(num_batches * 2 - 1), 1))
    return calls


def test_no_collective_is_added_to_a_batch(on_ranks) -> None:
    for few, many in zip(on_ranks(2, count_collectives, 3), on_ranks(2, count_collectives, 13), strict=True):
        added = {name: many[name] - few.get(name, 0) for name in many if many[name] != few.get(name, 0)}
        assert added == {"broadcast": 10}  # Lightning's own, before each training batch
