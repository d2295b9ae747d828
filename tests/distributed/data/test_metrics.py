"""Values of metrics do not depend on which ranks have batches, on who reads them, or on whose value is monitored."""

import os
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric, MetricCollection, SumMetric

from tests.contract.cases import strategy_of
from tests.models.linear import Linear, ones
from tests.running import quiet_trainer

# Steps in which only some ranks have a batch


class Recording(Linear):
    """Records the values of its metrics in each step."""

    def __init__(self) -> None:
        super().__init__(1)
        self.metric = SumMetric(dist_sync_on_step=True)
        self.in_list = [MetricCollection([SumMetric(dist_sync_on_step=True)])]
        self.of_steps: list[float] = []

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.layer(batch)
        self.of_steps.append(float(self.metric(batch)))
        assert self.of_steps[-1] == float(self.in_list[0](batch)["SumMetric"])
        self.log("sum", self.metric, on_step=True, on_epoch=True)

    def predict_step(self, batch: Tensor, batch_idx: int) -> None:
        self.layer(batch)
        self.of_steps.append(float(self.metric(batch)))


def values_of_steps(label: str, stage: str) -> tuple[list[float], dict[str, float]]:
    module = Recording()
    trainer = quiet_trainer(devices=2, strategy=strategy_of(label, timeout=30.0))
    loader: DataLoader[Any] = DataLoader(torch.arange(1.0, 7).view(6, 1), batch_size=2)  # type: ignore[arg-type]
    if stage == "predict":
        trainer.predict(module, loader, return_predictions=False)
    else:
        trainer.validate(module, loader, verbose=False)
    assert module.metric.dist_sync_on_step
    return module.of_steps, {key: float(value) for key, value in trainer.callback_metrics.items()}


@pytest.mark.parametrize("label", ["paral_ddp", "paral_fsdp", "paral_zero3"])
@pytest.mark.parametrize("stage", ["validate", "predict"])
def test_rank_without_a_batch_takes_no_part_in_the_step(on_ranks, label: str, stage: str) -> None:
    (first, values), (second, others) = on_ranks(2, values_of_steps, label, stage, timeout=60.0)

    assert (first, second) == ([10.0, 11.0], [10.0])
    if stage == "validate":
        assert values["sum_epoch"] == others["sum_epoch"] == 21.0


# Hooks of some ranks that read the values of the epoch, such as the progress bar


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
        self.logged.reset()  # it keeps the value of the epoch
        self.values.append(float(self.computed.compute()))
        self.computed.reset()


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


# The best checkpoint


VALUES = ([3.0, 1.0, 2.0], [1.5, 2.5, 0.5])
"""The value of each rank in each epoch."""


class Monitored(Linear):
    """Logs a value in validation that differs between the ranks, without `sync_dist`."""

    def __init__(self, rank_zero_only: bool) -> None:
        super().__init__()
        self.rank_zero_only = rank_zero_only

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        value = torch.tensor(VALUES[self.global_rank][self.current_epoch])
        self.log("val_loss", value, rank_zero_only=self.rank_zero_only)


def fit_monitored(strategy: str, folder: str, rank_zero_only: bool) -> tuple[str, float, list[str], bool]:
    best = ModelCheckpoint(folder, filename="{epoch}-{val_loss:.2f}", monitor="val_loss", save_top_k=1)
    trainer = quiet_trainer(
        strategy=strategy, devices=2, max_epochs=3, num_sanity_val_steps=0, enable_checkpointing=True, callbacks=best
    )
    trainer.fit(Monitored(rank_zero_only), ones(), ones())
    assert best.best_model_score is not None
    is_restored = "_monitor_candidates" not in vars(best)
    return best.best_model_path, float(best.best_model_score), list(best.best_k_models), is_restored


@pytest.mark.parametrize("rank_zero_only", [False, True])
@pytest.mark.parametrize("strategy", ["paral_ddp", "paral_fsdp", "paral_zero2"])
def test_all_ranks_choose_the_best_checkpoint_of_rank_0(
    on_ranks, tmp_path, strategy: str, rank_zero_only: bool
) -> None:
    first, second = on_ranks(2, fit_monitored, strategy, str(tmp_path), rank_zero_only)

    assert first == second
    path, score, _, is_restored = first
    assert (os.path.basename(path), score) == ("epoch=1-val_loss=1.00.ckpt", 1.0)
    assert os.path.exists(path)
    assert is_restored
