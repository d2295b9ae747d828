"""Metrics that steps synchronize where only some ranks have a batch: a step counts what this rank has."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torchmetrics import MetricCollection, SumMetric

from tests.contract.cases import strategy_of
from tests.models.linear import Linear
from tests.running import quiet_trainer


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
