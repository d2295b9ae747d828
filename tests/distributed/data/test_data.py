"""Every kind of loader is divided correctly under a real Trainer with real ranks."""

import multiprocessing
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import BasePredictionWriter, EarlyStopping
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Sampler,
    WeightedRandomSampler,
)

from lightning_paral import GatherPredictions, ParalDDPStrategy
from lightning_paral.errors import ConfigurationError
from tests.running import SaveAt, quiet_trainer


class Indices(Dataset[int]):
    """Samples equal to their indices, so that a batch shows which were drawn."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor(float(index))


class Stream(IterableDataset[float]):
    def __init__(self, length: int, divided: bool = False) -> None:
        self.length = length
        self.divided = divided

    def __iter__(self) -> Iterator[float]:
        start, step = (dist.get_rank(), dist.get_world_size()) if self.divided else (0, 1)
        yield from map(float, range(start, self.length, step))


class Recorder(LightningModule):
    """Records every batch by loader."""

    def __init__(self, log_steps: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.trained: list[Any] = []
        self.evaluated: dict[int, list[list[float]]] = {}
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
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(loader: Any, num_ranks: int, model: Recorder | None = None, **options: Any) -> Recorder:
    """Fit on `loader`, by default for one epoch."""
    sampling = {key: options.pop(key) for key in ("split", "remainder", "shard_iterable") if key in options}
    validation = options.pop("validation", None)
    model = model or Recorder()
    trainer = quiet_trainer(
        **({"max_epochs": 1, "devices": num_ranks, "strategy": ParalDDPStrategy(**sampling)} | options)
    )
    trainer.fit(model, loader, validation)
    model.metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
    return model


def flat(batches: Any) -> list[float]:
    return [sample for item in batches for sample in (flat(item) if isinstance(item, list) else [item])]


# Map-style datasets


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


def fit_on_many_loaders() -> dict[str, Any]:
    results: dict[str, Any] = {}
    torch.manual_seed(dist.get_rank())  # ranks agree on the order although their generators differ
    plain = DataLoader(Indices(10), 2)
    results["sequential"] = fit(plain, 2).trained
    results["drop"] = fit(plain, 2, remainder="drop").trained
    results["original untouched"] = type(plain.batch_sampler) is BatchSampler
    results["shuffled"] = fit(DataLoader(Indices(12), 2, shuffle=True), 2).trained
    results["own class"] = fit(OwnLoader(8, 0.5), 2).trained
    results["buckets"] = fit(DataLoader(Indices(10), batch_sampler=Buckets(sizes=[1, 4, 2, 3])), 2).trained
    results["buckets, global"] = fit(
        DataLoader(Indices(10), batch_sampler=Buckets(sizes=[1, 4, 2, 3])), 2, split="global"
    ).trained
    results["no batch size"] = fit(DataLoader(Indices(6), batch_size=None), 2).trained
    weighted = WeightedRandomSampler([1.0] * 12, 12, replacement=False)
    results["weighted"] = fit(DataLoader(Indices(12), 3, sampler=weighted, drop_last=True), 2).trained
    own = DistributedSampler(Indices(8), 2, dist.get_rank(), shuffle=False)
    results["distributed already"] = fit(DataLoader(Indices(8), 2, sampler=own), 2).trained
    results["not wanted"] = fit(plain, 2, use_distributed_sampler=False).trained
    results["limited"] = fit(plain, 2, limit_train_batches=2).trained
    results["overfit"] = fit(DataLoader(Indices(12), 2, shuffle=True), 2, overfit_batches=2, max_epochs=2).trained
    multiprocessing.current_process()._config["daemon"] = (
        False  # the ranks of the pool are daemons, which may not start processes
    )
    workers = DataLoader(
        Indices(8), 2, shuffle=True, num_workers=1, persistent_workers=True, multiprocessing_context="fork"
    )
    results["workers"] = fit(workers, 2, max_epochs=3).trained
    results["workers again"] = fit(workers, 2, max_epochs=3).trained
    return results


def test_training_draws_from_every_kind_of_loader(on_ranks) -> None:
    first, second = on_ranks(2, fit_on_many_loaders)
    both = {key: (first[key], second[key]) for key in first}

    assert both["sequential"] == ([[0, 1], [4, 5], [8, 9]], [[2, 3], [6, 7], [0, 1]])
    assert both["drop"] == ([[0, 1], [4, 5]], [[2, 3], [6, 7]])
    assert first["original untouched"]
    assert sorted(flat(both["shuffled"])) == list(range(12)) != flat(both["shuffled"])
    assert both["own class"] == ([[0.5, 1.5], [4.5, 5.5]], [[2.5, 3.5], [6.5, 7.5]])
    assert both["buckets"] == ([[0], [5, 6]], [[1, 2, 3, 4], [7, 8, 9]])
    # The first batch has one sample, so the other rank takes it as well, with weight zero.
    assert both["buckets, global"] == ([[0], [2, 4], [6], [8]], [[0], [1, 3], [5], [7, 9]])
    assert both["no batch size"] == ([0, 2, 4], [1, 3, 5])
    assert sorted(flat(both["weighted"])) == list(range(12))
    assert both["distributed already"] == ([[0, 2], [4, 6]], [[1, 3], [5, 7]])
    assert both["not wanted"] == ([[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]],) * 2
    assert both["limited"] == ([[0, 1], [4, 5]], [[2, 3], [6, 7]])
    assert both["overfit"] == ([[0, 1], [4, 5]] * 2, [[2, 3], [6, 7]] * 2)
    for name in ("workers", "workers again"):
        epochs = [flat([rank[step : step + 2] for rank in both[name]]) for step in (0, 2, 4)]
        assert all(sorted(epoch) == list(range(8)) for epoch in epochs)
        assert epochs[0] != epochs[1] != epochs[2]


def fit_on_combined_and_reloaded() -> dict[str, Any]:
    pair = CombinedLoader(
        [DataLoader(Indices(8), 1, shuffle=True), DataLoader(Indices(8), 1, shuffle=True)], "min_size"
    )
    cycled = [DataLoader(Indices(8), 2), DataLoader(Indices(4), 1, shuffle=True)]

    class Reloading(Recorder):
        def train_dataloader(self) -> Any:
            return DataLoader(Indices(8), 1, shuffle=True)

    reloading = Reloading()
    trainer = quiet_trainer(max_epochs=3, devices=2, strategy=ParalDDPStrategy(), reload_dataloaders_every_n_epochs=1)
    trainer.fit(reloading)
    steps = Recorder()
    quiet_trainer(max_steps=7, devices=2, strategy=ParalDDPStrategy()).fit(
        steps, DataLoader(Indices(12), 2, shuffle=True)
    )
    return {
        "pair": fit(pair, 2).trained,
        "cycled": fit(cycled, 2, max_epochs=1).trained,
        "reloaded": reloading.trained,
        "by steps": steps.trained,
    }


def test_combined_and_reloaded_loaders_draw_like_one_process(on_ranks) -> None:
    first, second = on_ranks(2, fit_on_combined_and_reloaded)

    pairs = first["pair"] + second["pair"]
    ones, others = flat([one for one, _ in pairs]), flat([other for _, other in pairs])
    assert sorted(ones) == sorted(others) == list(range(8))
    assert ones != others
    assert flat([one for one, _ in first["cycled"]]) == [0, 1, 4, 5]
    assert sorted(flat([other for _, other in first["cycled"] + second["cycled"]])) == [0, 1, 2, 3]
    epochs = [flat([rank["reloaded"][step : step + 4] for rank in (first, second)]) for step in (0, 4, 8)]
    assert all(sorted(epoch) == list(range(8)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert [len(rank["by steps"]) for rank in (first, second)] == [7, 7]
    assert sorted(flat([rank["by steps"][3:6] for rank in (first, second)])) == list(range(12))


# Evaluation


def evaluate_in_corners() -> dict[str, Any]:
    results: dict[str, Any] = {}

    def validate(loaders: Any, model: Recorder, **options: Any) -> tuple[Any, Any]:
        sampling = {key: options.pop(key) for key in ("split", "shard_iterable") if key in options}
        trainer = quiet_trainer(devices=3, strategy=ParalDDPStrategy(**sampling), **options)
        logged = trainer.validate(model, loaders, verbose=False)
        return logged, model.evaluated

    results["one sample"] = validate(DataLoader(Indices(1), 2), Recorder(log_steps=True))
    results["limited"] = validate(DataLoader(Indices(20), 2), Recorder(), limit_val_batches=0.5)
    results["stream"] = validate(DataLoader(Stream(7), 2), Recorder(log_steps=True))
    results["divided stream"] = validate(DataLoader(Stream(7, divided=True), 1), Recorder(), shard_iterable=False)
    results["drawn by the step"] = validate(DataLoader(Indices(7), 2), DrawsItself())
    results["longest"] = validate(
        CombinedLoader({"a": DataLoader(Indices(5), 1), "b": DataLoader(Indices(2), 1)}, "max_size"), Pairs()
    )
    results["shortest"] = validate(
        CombinedLoader({"a": DataLoader(Indices(5), 1), "b": DataLoader(Indices(2), 1)}, "min_size"), Pairs()
    )
    model = fit(
        DataLoader(Indices(12), 2),
        3,
        validation=[DataLoader(Indices(4), 2), DataLoader(Indices(1), 1)],
        callbacks=[EarlyStopping("own/dataloader_idx_1", patience=5)],
        max_epochs=2,
    )
    results["in fit"] = model.metrics, model.evaluated
    return results


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


def test_evaluation_counts_each_sample_once_in_corner_cases(on_ranks) -> None:
    ranks = on_ranks(3, evaluate_in_corners)

    def together(name: str, loader: int = 0) -> list[Any]:
        return sorted(flat([rank[name][1].get(loader, []) for rank in ranks]), key=str)

    for rank in ranks:
        assert rank["one sample"][0] == [{"mean_epoch": 0.0, "own": 0.0}]
        assert rank["stream"][0][0]["mean_epoch"] == pytest.approx(3.0)
        assert rank["divided stream"][0][0]["mean"] == pytest.approx(3.0)
        assert rank["drawn by the step"][0] == [{"mean_epoch": 3.0}]
        assert rank["longest"][0] == [{"mean": 2.0}]
        assert rank["shortest"][0] == [{"mean": 0.5}]
        metrics, _ = rank["in fit"]
        assert metrics["mean/dataloader_idx_0"] == 1.5
        assert metrics["own/dataloader_idx_1"] == 0.0  # also on ranks without a sample
        assert metrics["train"] == 5.5
    assert together("one sample") == [0.0]
    # Half of the 4 rounds that 10 batches of 2 take on 3 ranks.
    assert together("limited") == [float(index) for index in range(12)] or sorted(together("limited")) == list(
        range(12)
    )
    assert sorted(together("stream")) == sorted(together("divided stream")) == list(range(7))
    assert sorted(together("drawn by the step")) == list(range(7))
    pairs = {name: {pair for rank in ranks for pair in rank[name][1].get(0, [])} for name in ("longest", "shortest")}
    assert pairs["longest"] == {(0.0, 0.0), (1.0, 1.0), (2.0, None), (3.0, None), (4.0, None)}
    assert pairs["shortest"] == {(0.0, 0.0), (1.0, 1.0)}
    assert sorted(together("in fit", 1)) == [0.0] * 3  # the sanity check, and two epochs


class Written(BasePredictionWriter):
    def __init__(self) -> None:
        super().__init__("batch")
        self.indices: list[Any] = []

    def write_on_batch_end(self, trainer: Any, module: Any, prediction: Any, indices: Any, *args: Any) -> None:
        self.indices.append((indices, prediction.tolist()))


def predict() -> dict[str, Any]:
    results: dict[str, Any] = {}
    for split in ("batch", "global"):
        written = Written()
        trainer = quiet_trainer(devices=3, strategy=ParalDDPStrategy(split=split), callbacks=[written])
        trainer.predict(Recorder(), DataLoader(Indices(8), 2, drop_last=True))
        results[f"{split}, written"] = written.indices
        for name, loader in (
            ("indices", DataLoader(Indices(7), 2)),
            ("stream", DataLoader(Stream(7), 3)),
            ("singles", DataLoader(Indices(7), None)),
        ):
            trainer = quiet_trainer(devices=3, strategy=ParalDDPStrategy(split=split), callbacks=[GatherPredictions()])
            results[f"{split}, {name}"] = [
                torch.as_tensor(each).tolist() for each in trainer.predict(Recorder(), loader)
            ]
    return results


def test_predictions_are_gathered_once_and_in_order(on_ranks) -> None:
    ranks = on_ranks(3, predict)

    for split in ("batch", "global"):
        written = [pair for rank in ranks for pair in rank[f"{split}, written"]]
        assert all(indices == prediction for indices, prediction in written)
        assert sorted(flat([prediction for _, prediction in written])) == list(range(8))
        for rank in ranks:
            assert rank[f"{split}, indices"] == [[0, 1], [2, 3], [4, 5], [6]]
            assert rank[f"{split}, stream"] == [[0, 1, 2], [3, 4, 5], [6]]
            assert rank[f"{split}, singles"] == list(range(7))


# Streams


def fit_on_streams() -> dict[str, Any]:
    return {
        "wrap": fit(DataLoader(Stream(9), 2), 2).trained,
        "drop": fit(DataLoader(Stream(9), 2), 2, remainder="drop").trained,
        "global": fit(DataLoader(Stream(8), 4), 2, split="global", max_epochs=2).trained,
        "divided, drop": fit(DataLoader(Stream(5, divided=True), 1), 2, shard_iterable=False, remainder="drop").trained,
        "divided, wrap": fit(DataLoader(Stream(5, divided=True), 1), 2, shard_iterable=False).trained,
    }


def test_iterable_datasets_are_sharded_and_end_together(on_ranks) -> None:
    first, second = on_ranks(2, fit_on_streams)
    both = {key: (first[key], second[key]) for key in first}

    assert both["wrap"] == ([[0, 1], [4, 5], [8]], [[2, 3], [6, 7], [2, 3]])
    assert both["drop"] == ([[0, 1], [4, 5]], [[2, 3], [6, 7]])
    assert both["global"] == ([[0, 2], [4, 6]] * 2, [[1, 3], [5, 7]] * 2)
    assert both["divided, drop"] == ([[0], [2]], [[1], [3]])
    assert both["divided, wrap"] == ([[0], [2], [4]], [[1], [3], [1]])


# Resuming inside an epoch


class Unseen(Indices):
    """Raises if it has to load samples that were trained on before."""

    def __init__(self, length: int, num_seen: int = 0) -> None:
        super().__init__(length)
        self.num_seen = num_seen

    def __getitem__(self, index: int) -> Tensor:
        assert index >= self.num_seen
        return super().__getitem__(index)


class Planning(Recorder):
    """Reads the number of steps, for which Lightning creates the loaders before it loads a checkpoint."""

    def configure_optimizers(self) -> Any:
        self.num_steps = self.trainer.estimated_stepping_batches
        return super().configure_optimizers()


def interrupt(num_ranks: int, loader: Any, path: str, **options: Any) -> Recorder:
    callbacks = [SaveAt(3, path)]
    return fit(loader, num_ranks, Planning(), callbacks=callbacks, max_steps=3, max_epochs=-1, **options)


def resume(num_ranks: int, loader: Any, path: str, **options: Any) -> list[Any]:
    model = Planning()
    sampling = {key: options.pop(key) for key in ("split",) if key in options}
    trainer = quiet_trainer(**({"max_epochs": 2} | options), devices=num_ranks, strategy=ParalDDPStrategy(**sampling))
    trainer.fit(model, loader, ckpt_path=path)
    return model.trained


def interrupt_all(num_ranks: int, folder: str) -> None:
    interrupt(num_ranks, DataLoader(Indices(20), 2), f"{folder}/indices.ckpt")
    interrupt(num_ranks, DataLoader(Stream(20), 2), f"{folder}/stream.ckpt")
    interrupt(num_ranks, DataLoader(Indices(24), 4, shuffle=True), f"{folder}/global.ckpt", split="global")


def resume_all(num_ranks: int, folder: str) -> dict[str, Any]:
    multiprocessing.current_process()._config["daemon"] = False
    workers = {"num_workers": 1, "multiprocessing_context": "fork"}
    indices, seen = f"{folder}/indices.ckpt", 3 * 2 * 2
    return {
        "indices": resume(num_ranks, DataLoader(Unseen(20, seen), 2), indices, max_epochs=1),
        "by steps": resume(num_ranks, DataLoader(Indices(20), 2), indices, max_steps=7, max_epochs=-1),
        "workers": resume(num_ranks, DataLoader(Unseen(20, seen), 2, **workers), indices, max_epochs=1),
        "stream": resume(num_ranks, DataLoader(Stream(20), 2), f"{folder}/stream.ckpt"),
        "stream, workers": resume(
            num_ranks, DataLoader(Stream(20), 2, persistent_workers=True, **workers), f"{folder}/stream.ckpt"
        ),
        "global": resume(
            num_ranks, DataLoader(Indices(24), 4, shuffle=True), f"{folder}/global.ckpt", split="global", max_epochs=1
        ),
    }


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_resuming_skips_the_samples_seen_at_any_world_size(on_ranks, tmp_path, world_size: int) -> None:
    on_ranks(2, interrupt_all, 2, str(tmp_path))

    ranks = on_ranks(world_size, resume_all, world_size, str(tmp_path))

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


# Bad input


class LooksAtTheRank(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(dist.get_rank(), 8))

    def __len__(self) -> int:
        return 8


def fail(loader: Any, **options: Any) -> str:
    with pytest.raises(ConfigurationError) as raised:
        fit(loader, 2, **options)
    return str(raised.value)


def fail_to_draw() -> str:
    trainer = quiet_trainer(devices=2, strategy="paral_zero3")
    with pytest.raises(ConfigurationError) as raised:
        trainer.validate(DrawsItself(), DataLoader(Indices(7), 2))
    return str(raised.value)


def test_step_with_dataloader_iter_is_refused_under_collective_forward(on_ranks) -> None:
    for message in on_ranks(2, fail_to_draw):
        assert "DrawsItself.validation_step takes a `dataloader_iter`" in message


def fail_in_every_way() -> list[str]:
    return [
        fail(DataLoader(Indices(8), 2, sampler=LooksAtTheRank())),
        fail(DataLoader(Indices(2), 2), remainder="drop"),
        fail(DataLoader(Indices(2), batch_sampler=Buckets(sizes=[2])), remainder="drop"),
        fail(DataLoader(Stream(2), 2), remainder="drop"),
        fail(DataLoader(Indices(8), 1), split="global"),
        fail(DataLoader(Indices(8), None), split="global"),
        fail(DataLoader(Stream(8), 3), split="global"),
    ]


def test_invalid_loaders_are_named_on_every_rank(on_ranks) -> None:
    for messages in on_ranks(2, fail_in_every_way):
        different, *too_few, small, unbatched, indivisible = messages
        assert "The LooksAtTheRank first draws [[0, 1], [2, 3], [4, 5], [6, 7]] on rank 0 and [[1, 2]," in different
        assert all("has fewer batches than there are ranks, 2" in message for message in too_few)
        assert "batch_size=1" in small
        assert "batch_size=None" in unbatched
        assert "batch_size=3" in indivisible


# Cost


def count_collectives(num_batches: int) -> dict[str, int]:
    """Count the calls into torch.distributed while training and evaluating."""
    calls: dict[str, int] = {}
    names = ("all_reduce", "all_gather", "all_gather_object", "broadcast", "barrier", "broadcast_object_list")

    def counted(name: str) -> Any:
        original = getattr(dist, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            calls[name] = calls.get(name, 0) + 1
            return original(*args, **kwargs)

        return original, call

    replaced = {name: counted(name) for name in names}
    for name, (_, call) in replaced.items():
        setattr(dist, name, call)
    try:
        fit(DataLoader(Indices(num_batches * 2), 1), 2, validation=DataLoader(Indices(num_batches * 2 - 1), 1))
    finally:
        for name, (original, _) in replaced.items():
            setattr(dist, name, original)
    return calls


def test_no_collective_is_added_to_a_batch(on_ranks) -> None:
    for few, many in zip(on_ranks(2, count_collectives, 3), on_ranks(2, count_collectives, 13), strict=True):
        added = {name: many[name] - few.get(name, 0) for name in many if many[name] != few.get(name, 0)}
        assert added == {"broadcast": 10}  # Lightning's own, before each training batch


def saved_seeds(folder: str) -> list[int]:
    """Return the seeds of orders in checkpoints saved after an evaluation, another one, a fit, and an evaluation."""
    os.environ.pop("PL_GLOBAL_SEED", None)
    model, loader = Recorder(), DataLoader(Indices(8), batch_size=2)
    trainer = quiet_trainer(devices=2, strategy="paral_ddp", max_epochs=1)
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
