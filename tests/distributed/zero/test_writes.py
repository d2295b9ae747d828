"""Writes to parameters under ZeRO reach master weights, and weights on NVMe."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_paral import ParalZeROStrategy
from tests.contract.cases import MAIN
from tests.models.regression import Regression, fit, regression_data
from tests.running import assert_same_fit, quiet_trainer


def partitioned() -> ParalZeROStrategy:
    """Return a stage 3 strategy that partitions parameters of any size."""
    return ParalZeROStrategy(stage=3, deepspeed_config={"zero_optimization": {"stage3_param_persistence_threshold": 0}})


STRATEGIES: dict[str, Callable[[], Any]] = {
    **{case.label: case.strategy for case in MAIN if case.needs_deepspeed},
    "partitioned": partitioned,
}


def fit_in_bf16(label: str) -> list[Tensor]:
    torch.manual_seed(3)
    model = Regression()
    seen = []

    def look_at_masters(*_: Any) -> None:
        seen.append(model.trainer.strategy.full_parameter(model.out.weight))
        with torch.no_grad():
            model.out.weight[1] = 0.5

    model.on_train_batch_end = look_at_masters  # type: ignore[method-assign]
    trainer = quiet_trainer(max_epochs=1, devices=2, strategy=STRATEGIES[label](), precision="bf16-true")
    trainer.fit(model, regression_data(2, 2))
    return seen


@pytest.mark.parametrize("label", STRATEGIES)
def test_master_weights_change_only_where_weights_were_written(on_ranks, label: str) -> None:
    for first, second in on_ranks(2, fit_in_bf16, label):
        assert (first.bfloat16().float() != first).any()  # master weights have more precision
        moved = (second - first).abs()
        assert moved[0].max() < 0.05  # one step of AdamW with lr=1e-2
        assert ((second[1] - 0.5).abs() < 0.05).all()


def offloaded() -> Any:
    from lightning_paral import Offload

    folder = Path(tempfile.gettempdir(), "lightning_paral_tests_nvme")
    folder.mkdir(exist_ok=True)
    nvme = Offload("nvme", path=folder, buffer_numel=10_000)
    return ParalZeROStrategy(
        stage=3,
        offload_optimizer=nvme,
        offload_parameters=nvme,
        deepspeed_config={"zero_optimization": {"stage3_param_persistence_threshold": 0}},
    )


class Written(Regression):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        with torch.no_grad():
            self.out.weight[0, :3] = 0.0

    def on_train_batch_end(self, *_: Any) -> None:
        for parameter in self.parameters():
            parameter.data.clamp_(-0.3, 0.3)


def fit_on_nvme() -> Any:
    return fit(Written, 5, 2, strategy=offloaded())


@pytest.mark.deepspeed_operators
def test_writes_reach_weights_on_nvme(on_ranks) -> None:
    assert_same_fit(on_ranks(2, fit_on_nvme), fit(Written, 5, 1), 1e-4)
