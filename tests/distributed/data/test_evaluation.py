"""Evaluation counts each sample once, whatever the loader, and predictions are gathered in order."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import BasePredictionWriter, EarlyStopping
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch.utils.data import DataLoader

from lightning_paral import ConfigurationError, GatherPredictions
from tests.models.recorded import Indices, Recorder, Stream, fit, flat, trainer_of


class DrawsItself(Recorder):
    def validation_step(self, dataloader_iter: Iterator[Any]) -> None:
        next(dataloader_iter)


class ReadsTwo(Recorder):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        values, _ = batch
        self.evaluated.setdefault(0, []).append(values.tolist())
        self.log("mean", values.mean(), sync_dist=True, on_step=True, on_epoch=True, batch_size=len(values))


def longest_of_two() -> Any:
    """Return 9 batches and 4: in the second of three steps, only one of three ranks has a batch of the shorter one."""
    return CombinedLoader([DataLoader(Indices(18), 2), DataLoader(Indices(7), 2)], "max_size")


EVALUATED: dict[str, tuple[Any, Any, dict[str, Any], dict[str, float], set[Any]]] = {
    "one sample": (
        lambda: DataLoader(Indices(1), 2),
        lambda: Recorder(log_steps=True),
        {},
        {"mean_epoch": 0.0, "own": 0.0},
        {0.0},
    ),
    # Half of the 4 rounds that 10 batches of 2 take on 3 ranks.
    "limited": (lambda: DataLoader(Indices(20), 2), Recorder, {"limit_val_batches": 0.5}, {}, set(range(12))),
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
    "longest of two": (longest_of_two, ReadsTwo, {}, {"mean_epoch": 8.5}, set(range(18))),
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
    assert len(seen) == len(samples)


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


def fail_to_draw() -> str:
    with pytest.raises(ConfigurationError) as raised:
        trainer_of().validate(DrawsItself(), DataLoader(Indices(7), 2))
    return str(raised.value)


def test_evaluation_with_dataloader_iter_is_refused(on_ranks) -> None:
    for message in on_ranks(2, fail_to_draw):
        assert "DrawsItself.validation_step takes a `dataloader_iter`" in message
