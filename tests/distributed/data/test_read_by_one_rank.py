"""Hooks of some ranks that read the values of the epoch, such as the progress bar, do not change any value."""

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torchmetrics import MeanMetric

from tests.contract.cases import strategy_of
from tests.models.linear import Linear, ones
from tests.running import quiet_trainer


class TwoMetrics(Linear):
    """Logs one metric and a value, and computes another metric at the end of the epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.logged, self.computed = MeanMetric(), MeanMetric()
        self.values: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.logged.update(1.0 + self.global_rank)
        self.computed.update(100.0 + self.global_rank)
        self.log("logged", self.logged, on_step=False, on_epoch=True)
        self.log("value", torch.tensor(7.0 + self.global_rank), on_step=False, on_epoch=True, sync_dist=True)
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        self.values.append(float(self.computed.compute()))
        self.computed.reset()


class ResetsAtEnd(TwoMetrics):
    """Resets a metric that was logged before, in the hook at the end of the epoch."""

    def on_train_epoch_end(self) -> None:
        self.logged.reset()


class ReadOnRankZero(Callback):
    """Reads the values as user callbacks do that report on rank 0."""

    def __init__(self) -> None:
        self.found: list[float] = []

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero:
            self.found.append(float(trainer.callback_metrics["logged"]))


def fit(label: str, with_bar: bool) -> tuple[dict[str, float], list[float], list[float]]:
    module, reader = TwoMetrics(), ReadOnRankZero()
    callbacks = [] if with_bar else [reader]
    options: dict[str, Any] = {"enable_progress_bar": with_bar, "callbacks": callbacks, "max_epochs": 2}
    trainer = quiet_trainer(devices=2, strategy=strategy_of(label, timeout=30.0), **options)
    trainer.fit(module, ones(16, 2))
    return {key: float(value) for key, value in trainer.callback_metrics.items()}, module.values, reader.found


@pytest.mark.parametrize("with_bar", [True, False])
@pytest.mark.parametrize("label", ["paral_ddp", "paral_fsdp", "paral_zero2"])
def test_values_are_those_of_one_process(on_ranks, label: str, with_bar: bool) -> None:
    for rank, (logged, computed, found) in enumerate(on_ranks(2, fit, label, with_bar, timeout=100.0)):
        assert logged == {"logged": 1.5, "value": 7.5}
        assert computed == [100.5, 100.5]
        assert found == ([] if with_bar or rank else [1.5, 1.5])


def fit_with_reset() -> float:
    trainer = quiet_trainer(devices=2, strategy=strategy_of("paral_ddp"), max_epochs=2)
    trainer.fit(ResetsAtEnd(), ones(16, 2))
    return float(trainer.callback_metrics["logged"])


def test_metric_that_a_hook_resets_has_the_value_of_the_epoch(on_ranks) -> None:
    assert on_ranks(2, fit_with_reset) == [1.5, 1.5]
