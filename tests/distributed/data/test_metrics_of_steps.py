"""Metrics that steps synchronize where only some ranks have a batch: a step counts what this rank has."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset
from torchmetrics import CatMetric, MetricCollection, SumMetric

from tests.contract.cases import strategy_of
from tests.models.linear import Linear
from tests.running import quiet_trainer

LABELS = ["paral_ddp", "paral_fsdp", "paral_zero3"]


class Numbers(IterableDataset[Tensor]):
    """The numbers from 1 to 6."""

    def __iter__(self) -> Any:
        return iter(samples())


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


def samples() -> Tensor:
    return torch.arange(1.0, 7).view(6, 1)


def values_of_steps(label: str, stage: str, of_stream: bool) -> tuple[list[float], dict[str, float]]:
    module = Recording()
    trainer = quiet_trainer(devices=2, strategy=strategy_of(label, timeout=30.0))
    loader: Any = DataLoader(Numbers() if of_stream else samples(), batch_size=2)
    if stage == "predict":
        trainer.predict(module, loader, return_predictions=False)
    else:
        trainer.validate(module, loader, verbose=False)
    assert module.metric.dist_sync_on_step
    return module.of_steps, {key: float(value) for key, value in trainer.callback_metrics.items()}


@pytest.mark.parametrize("label", LABELS)
@pytest.mark.parametrize("stage", ["validate", "predict"])
def test_rank_without_a_batch_takes_no_part_in_the_step(on_ranks, label: str, stage: str) -> None:
    (first, values), (second, others) = on_ranks(2, values_of_steps, label, stage, False, timeout=60.0)

    assert (first, second) == ([10.0, 11.0], [10.0])
    if stage == "validate":
        assert values["sum_epoch"] == others["sum_epoch"] == 21.0


def test_ranks_with_different_parts_of_a_stream_synchronize_no_step(on_ranks) -> None:
    (first, values), (second, others) = on_ranks(2, values_of_steps, "paral_ddp", "validate", True, timeout=60.0)

    assert len(first) + len(second) == 3
    assert values["sum_epoch"] == others["sum_epoch"] == 21.0


class Computing(Linear):
    """Computes a metric in each step, and again at the end."""

    def __init__(self) -> None:
        super().__init__(1)
        self.metrics = MetricCollection([CatMetric(), SumMetric()])
        self.of_steps: list[float] = []

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.layer(batch)
        self.metrics.update(batch)
        self._compute()

    def on_validation_epoch_end(self) -> None:
        self._compute()

    def _compute(self) -> None:
        values = self.metrics.compute()
        self.of_steps.append(float(values["SumMetric"]))
        assert self.of_steps[-1] == float(values["CatMetric"].sum())


def computed_in_steps(label: str) -> list[float]:
    module = Computing()
    trainer = quiet_trainer(devices=2, strategy=strategy_of(label, timeout=30.0))
    trainer.validate(module, DataLoader(samples(), batch_size=2), verbose=False)
    return module.of_steps


@pytest.mark.parametrize("label", LABELS)
def test_metric_that_steps_compute_counts_all_ranks_that_have_a_batch(on_ranks, label: str) -> None:
    of_all, of_rank_0 = 10.0, 1.0 + 2.0 + 5.0 + 6.0

    assert on_ranks(2, computed_in_steps, label, timeout=60.0) == [[of_all, of_rank_0, 21.0], [of_all, 21.0]]
