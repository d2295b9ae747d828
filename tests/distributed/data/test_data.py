"""Every kind of loader is divided correctly under a real Trainer with real ranks: which samples each rank draws."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import BasePredictionWriter, EarlyStopping
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Sampler,
    WeightedRandomSampler,
)

from lightning_paral import ConfigurationError, GatherPredictions, ParalDDPStrategy
from tests.running import SaveAt, quiet_trainer

WORKER = {"num_workers": 1, "multiprocessing_context": "fork"}


class Indices(Dataset[int]):
    """Samples equal to their indices, so that a batch shows which were drawn."""

    def __init__(self, length: int, num_seen: int = 0) -> None:
        self.length, self.num_seen = length, num_seen

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Tensor:
        assert index >= self.num_seen, "a sample was loaded that was trained on before"
        return torch.tensor(float(index))


class Stream(IterableDataset[float]):
    def __init__(self, length: int, divided: bool = False) -> None:
        self.length, self.divided = length, divided

    def __iter__(self) -> Iterator[float]:
        start, step = (dist.get_rank(), dist.get_world_size()) if self.divided else (0, 1)
        yield from map(float, range(start, self.length, step))


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


class Recorder(LightningModule):
    """Records every batch by loader."""

    def __init__(self, log_steps: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.trained: list[Any] = []
        self.evaluated: dict[int, list[Any]] = {}
        self.log_steps = log_steps

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        parts = batch if isinstance(batch, list | tuple) else [batch]
        self.trained.append([part.tolist() for part in parts] if len(parts) > 1 else parts[0].tolist())
        mean = torch.stack([part.float().mean() for part in parts]).mean()
        self.log("train", mean.detach(), on_step=False, on_epoch=True, sync_dist=True, batch_size=parts[0].numel())
        return self.weight * mean * 1e-3

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.evaluated.setdefault(dataloader_idx, []).append(batch.tolist())
        self.log("mean", batch.float().mean(), sync_dist=True, on_step=self.log_steps, on_epoch=True)
        self.log("own", batch.float().mean(), batch_size=batch.numel())

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return batch * self.weight.detach()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        self.num_steps = self.trainer.estimated_stepping_batches  # creates the loaders before a checkpoint is loaded
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trainer_of(split: str = "batch", remainder: str = "wrap", shard_iterable: bool = True, **options: Any) -> Any:
    strategy = ParalDDPStrategy(split=split, remainder=remainder, shard_iterable=shard_iterable)  # type: ignore[arg-type]
    return quiet_trainer(**({"strategy": strategy, "devices": dist.get_world_size(), "max_epochs": 1} | options))


def fit(loader: Any, validation: Any = None, ckpt_path: Any = None, **options: Any) -> Recorder:
    """Fit on `loader`, by default for one epoch. Assert that the user's loader stays as it is."""
    model, trainer, before = Recorder(), trainer_of(**options), getattr(loader, "batch_sampler", None)
    trainer.fit(model, loader, validation, ckpt_path=ckpt_path)
    assert getattr(loader, "batch_sampler", None) is before
    model.metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
    return model


def flat(batches: Any) -> list[float]:
    return [sample for item in batches for sample in (flat(item) if isinstance(item, list) else [item])]


# Training

Rows = tuple[Callable[[], Any], dict[str, Any], Any]
"""A function that returns a loader, options of `fit`, and what is expected."""


def in_order(length: int = 10, **options: Any) -> Callable[[], Any]:
    return lambda: DataLoader(Indices(length), 2, **options)


def buckets() -> Any:
    return DataLoader(Indices(10), batch_sampler=Buckets(sizes=[1, 4, 2, 3]))


def distributed() -> Any:
    return DataLoader(Indices(8), 2, sampler=DistributedSampler(Indices(8), 2, dist.get_rank(), shuffle=False))


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
    "distributed already": (distributed, {}, ([[0, 2], [4, 6]], [[1, 3], [5, 7]])),
    "overfit": (
        in_order(12, shuffle=True),
        {"overfit_batches": 2, "max_epochs": 2},
        ([[0, 1], [4, 5]] * 2, [[2, 3], [6, 7]] * 2),
    ),
    "stream": (lambda: DataLoader(Stream(9), 2), {}, ([[0, 1], [4, 5], [8]], [[2, 3], [6, 7], [2, 3]])),
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


def trained_with_reloads() -> list[Any]:
    model = Recorder()
    model.train_dataloader = in_order(8, shuffle=True)  # type: ignore[method-assign]
    trainer_of(max_epochs=3, reload_dataloaders_every_n_epochs=1).fit(model)
    return model.trained


def test_reloaded_loaders_draw_every_sample_once_in_an_epoch(on_ranks) -> None:
    assert_new_order_in_each_epoch(on_ranks(2, trained_with_reloads), 3)


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


# Evaluation


class DrawsItself(Recorder):
    def validation_step(self, dataloader_iter: Iterator[Any]) -> None:
        batch, _, _ = next(dataloader_iter)
        self.evaluated.setdefault(0, []).append(batch.tolist())
        self.log("mean", batch.mean(), sync_dist=True, on_step=True, on_epoch=True, batch_size=len(batch))


class Pairs(Recorder):
    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        one, other = batch["a"], batch["b"]
        self.evaluated.setdefault(0, []).append((one.item(), None if other is None else other.item()))
        self.log("mean", one.float().mean(), sync_dist=True)


def pairs(mode: Any) -> Any:
    return CombinedLoader({"a": DataLoader(Indices(5), 1), "b": DataLoader(Indices(2), 1)}, mode)


EVALUATED: dict[str, tuple[Any, Any, dict[str, Any], dict[str, float], set[Any]]] = {
    "one sample": (in_order(1), lambda: Recorder(log_steps=True), {}, {"mean_epoch": 0.0, "own": 0.0}, {0.0}),
    # Half of the 4 rounds that 10 batches of 2 take on 3 ranks.
    "limited": (in_order(20), Recorder, {"limit_val_batches": 0.5}, {}, set(range(12))),
    "stream": (
        lambda: DataLoader(Stream(7), 2),
        lambda: Recorder(log_steps=True),
        {},
        {"mean_epoch": 3.0},
        set(range(7)),
    ),
    "divided stream": (
        lambda: DataLoader(Stream(7, divided=True), 1),
        Recorder,
        {"shard_iterable": False},
        {"mean": 3.0},
        set(range(7)),
    ),
    "drawn by the step": (in_order(7), DrawsItself, {}, {"mean_epoch": 3.0}, set(range(7))),
    "longest": (
        lambda: pairs("max_size"),
        Pairs,
        {},
        {"mean": 2.0},
        {(0.0, 0.0), (1.0, 1.0), (2.0, None), (3.0, None), (4.0, None)},
    ),
    "shortest": (lambda: pairs("min_size"), Pairs, {}, {"mean": 0.5}, {(0.0, 0.0), (1.0, 1.0)}),
}


def evaluated(name: str) -> tuple[dict[str, float], list[Any]]:
    make_loader, make_model, options, *_ = EVALUATED[name]
    model = make_model()
    (logged,) = trainer_of(**options).validate(model, make_loader(), verbose=False)
    return logged, flat(model.evaluated.get(0, []))


@pytest.mark.parametrize("name", EVALUATED)
def test_evaluation_counts_each_sample_once_in_corner_cases(on_ranks, name: str) -> None:
    *_, expected, samples = EVALUATED[name]
    ranks = on_ranks(3, evaluated, name)
    for logged, _ in ranks:
        assert {key: logged[key] for key in expected} == pytest.approx(expected)
    seen = [sample for _, samples in ranks for sample in samples]
    assert set(seen) == samples
    assert len(seen) == len(samples) or name == "longest"  # a loader that has ended is repeated


def evaluated_in_fit() -> tuple[dict[str, float], list[float]]:
    validation = [DataLoader(Indices(4), 2), DataLoader(Indices(1), 1)]
    stopping = EarlyStopping("own/dataloader_idx_1", patience=5)
    model = fit(DataLoader(Indices(12), 2), validation, callbacks=[stopping], max_epochs=2)
    return model.metrics, flat(model.evaluated.get(1, []))


def test_evaluation_in_a_fit_counts_each_sample_once(on_ranks) -> None:
    ranks = on_ranks(3, evaluated_in_fit)
    for metrics, _ in ranks:
        assert metrics["mean/dataloader_idx_0"] == 1.5
        assert metrics["own/dataloader_idx_1"] == 0.0  # also on ranks without a sample
        assert metrics["train"] == 5.5
    assert flat([seen for _, seen in ranks]) == [0.0] * 3  # the sanity check, and two epochs


class Written(BasePredictionWriter):
    def __init__(self) -> None:
        super().__init__("batch")
        self.indices: list[Any] = []

    def write_on_batch_end(self, trainer: Any, module: Any, prediction: Any, indices: Any, *args: Any) -> None:
        self.indices.append((indices, prediction.tolist()))


def written(split: str) -> list[Any]:
    callback = Written()
    trainer_of(split, callbacks=[callback]).predict(Recorder(), DataLoader(Indices(8), 2, drop_last=True))
    return callback.indices


def predicted(split: str) -> list[Any]:
    loaders: list[Any] = [DataLoader(Indices(7), 2), DataLoader(Stream(7), 3), DataLoader(Indices(7), None)]
    trainer = trainer_of(split, callbacks=[GatherPredictions()])
    return [[torch.as_tensor(each).tolist() for each in trainer.predict(Recorder(), loader)] for loader in loaders]


@pytest.mark.parametrize("split", ["batch", "global"])
def test_predictions_are_gathered_once_and_in_order(on_ranks, split: str) -> None:
    pairs = [pair for rank in on_ranks(3, written, split) for pair in rank]
    assert all(indices == prediction for indices, prediction in pairs)
    assert sorted(flat([prediction for _, prediction in pairs])) == list(range(8))

    expected = [[[0, 1], [2, 3], [4, 5], [6]], [[0, 1, 2], [3, 4, 5], [6]], list(range(7))]
    assert on_ranks(3, predicted, split) == [expected] * 3


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


def saved_seeds(folder: str) -> list[int]:
    """Return the seeds of orders in checkpoints saved after an evaluation, another one, a fit, and an evaluation."""
    model, loader, trainer = Recorder(), DataLoader(Indices(8), batch_size=2), trainer_of()
    seeds = []
    for seed, run in enumerate((trainer.validate, trainer.validate, trainer.fit, trainer.validate)):
        torch.manual_seed(seed)
        run(model, loader)
        trainer.save_checkpoint(f"{folder}/{seed}.ckpt")
        saved = torch.load(f"{folder}/{seed}.ckpt", weights_only=False)
        seeds.append(saved["lightning_paral.data"]["seed"])
    return seeds


def test_a_checkpoint_has_the_position_of_the_last_fit_or_else_of_the_last_evaluation(on_ranks, tmp_path) -> None:
    assert on_ranks(2, saved_seeds, str(tmp_path)) == [[0, 1, 2, 2]] * 2


# Bad input


class LooksAtTheRank(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(dist.get_rank(), 8))

    def __len__(self) -> int:
        return 8


DIFFERENT = "The LooksAtTheRank first draws [[0, 1], [2, 3], [4, 5], [6, 7]] on rank 0 and [[1, 2],"
TOO_FEW = "has fewer batches than there are ranks, 2"
REFUSED: dict[str, Rows] = {
    "orders differ": (lambda: DataLoader(Indices(8), 2, sampler=LooksAtTheRank()), {}, DIFFERENT),
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


def fail_to_draw() -> str:
    with pytest.raises(ConfigurationError) as raised:
        trainer_of(strategy="paral_zero3").validate(DrawsItself(), DataLoader(Indices(7), 2))
    return str(raised.value)


def test_step_with_dataloader_iter_is_refused_under_collective_forward(on_ranks) -> None:
    for message in on_ranks(2, fail_to_draw):
        assert "DrawsItself.validation_step takes a `dataloader_iter`" in message


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
