"""`ParalMonitor` on two ranks: the same training, the slow rank, loggers, the plan and resuming."""

import csv
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_paral import ParalMonitor, plan
from tests.models.planned import MODELS, Drawn
from tests.models.regression import FEATURES, Regression, fit_regression, regression_data
from tests.running import quiet_trainer

SLOW = 0.25
"""Seconds by which a rank is slower in each step: much more than a busy machine adds."""


def with_and_without(strategy: str, accumulate: int) -> tuple[Any, Any, dict[str, float]]:
    monitor = ParalMonitor(every_n_steps=2)
    measured = fit_regression(5, accumulate, 2, strategy=strategy, callbacks=[monitor])
    return measured, fit_regression(5, accumulate, 2, strategy=strategy), monitor.values


@pytest.mark.parametrize(
    ("strategy", "accumulate"), [("paral_ddp", 2), ("paral_fsdp", 1), ("paral_zero2", 2), ("ddp", 1)]
)
def test_training_is_the_same_with_the_callback(on_ranks, strategy: str, accumulate: int) -> None:
    results = on_ranks(2, with_and_without, strategy, accumulate)
    for (losses, weights), (expected_losses, expected), _ in results:
        assert losses == expected_losses
        assert all(torch.equal(weight, expected[name]) for name, weight in weights.items())
    values, of_other_rank = (values for *_, values in results)

    assert values["paral/step_seconds"] == of_other_rank["paral/step_seconds"] > 0
    assert values["paral/slowest_rank"] == of_other_rank["paral/slowest_rank"]
    peaks = values["paral/peak_bytes"], of_other_rank["paral/peak_bytes"]
    assert values["paral/worst_peak_bytes"] == max(peaks) >= min(peaks) > 2**20
    assert "paral/planned_bytes" not in values


class Samples(Dataset[list[Tensor]]):
    """Takes longer on one rank."""

    def __init__(self, slow_rank: int) -> None:
        self.slow_rank = slow_rank

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> list[Tensor]:
        if dist.get_rank() == self.slow_rank:
            time.sleep(SLOW)
        return [torch.ones(FEATURES), torch.ones(2)]


class SlowForward(Regression):
    """Takes longer in the training step on rank 1."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        time.sleep(SLOW * self.global_rank)
        return super().training_step(batch, batch_idx)


def slow_rank_of(strategy: str, slow_rank: int | None) -> dict[str, float]:
    """Fit with slow data on a rank, or else with a slow forward pass on rank 1."""
    monitor = ParalMonitor(every_n_steps=2)
    trainer = quiet_trainer(strategy=strategy, devices=2, max_epochs=1, callbacks=[monitor])
    model = SlowForward() if slow_rank is None else Regression()
    trainer.fit(model, DataLoader(Samples(-1 if slow_rank is None else slow_rank)))
    return monitor.values


@pytest.mark.parametrize(
    ("strategy", "slow_rank"),
    [("paral_ddp", 0), ("paral_ddp", None), ("paral_fsdp", 1), ("paral_zero2", 1), ("ddp", 0), ("ddp", None)],
)
def test_slow_rank_is_named(on_ranks, strategy: str, slow_rank: int | None) -> None:
    for values in on_ranks(2, slow_rank_of, strategy, slow_rank):
        assert values["paral/slowest_rank"] == (1 if slow_rank is None else slow_rank)
        assert SLOW * 0.8 < values["paral/slowest_rank_lag_seconds"] <= values["paral/step_seconds"] * 1.2


def logged_fit(folder: str, strategy: str, epochs: int, resume: str | None) -> list[str]:
    """Fit with a logger and checkpoints; return the steps of the values in the logger."""
    version = f"epochs-{epochs}"
    trainer = quiet_trainer(
        strategy=strategy,
        devices=2,
        max_epochs=epochs,
        callbacks=[ModelCheckpoint(folder, filename="{epoch}"), ParalMonitor(every_n_steps=2)],
        logger=CSVLogger(folder, version=version),
        enable_checkpointing=True,
        log_every_n_steps=1,
    )
    trainer.fit(Regression(), regression_data(6, 2), ckpt_path=resume)
    assert not any(name.startswith("paral/") for name in trainer.callback_metrics)
    if not trainer.is_global_zero:
        return []
    rows = list(csv.DictReader(Path(folder, "lightning_logs", version, "metrics.csv").read_text().splitlines()))
    return [row["step"] for row in rows if row["paral/step_seconds"]]


@pytest.mark.parametrize("strategy", ["paral_ddp", "ddp"])
def test_values_reach_loggers_in_a_resumed_fit_too(on_ranks, tmp_path: Path, strategy: str) -> None:
    assert on_ranks(2, logged_fit, str(tmp_path), strategy, 1, None)[0] == ["1", "3", "5"]

    checkpoint = str(tmp_path / "epoch=0.ckpt")
    assert on_ranks(2, logged_fit, str(tmp_path), strategy, 2, checkpoint)[0] == ["7", "9", "11"]


def planned_by_auto() -> int:
    make, draw = MODELS["gpt"]
    monitor = ParalMonitor(every_n_steps=1)
    trainer = quiet_trainer(max_steps=2, max_epochs=1, devices=2, strategy="paral_auto", callbacks=[monitor])
    trainer.fit(make(), DataLoader(Drawn(draw), batch_size=4))
    return int(monitor.values["paral/planned_bytes"]) if trainer.is_global_zero else 0


def test_planned_bytes_are_those_of_the_plan(on_ranks) -> None:
    make, draw = MODELS["gpt"]
    batch = next(iter(DataLoader(Drawn(draw), batch_size=4)))
    expected = plan(make, batch, 2, device_type="cpu").of("paral_ddp").peak_bytes

    assert on_ranks(2, planned_by_auto)[0] == expected
