"""`ParalMonitor` on two ranks: the same training, the slow rank, loggers, YAML and resuming."""

import csv
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning_paral.callbacks.monitoring.slow_rank import find_slow_rank
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_paral import ParalMonitor
from tests.models.regression import FEATURES, Regression, fit_regression, regression_data
from tests.running import quiet_trainer

LABELS = ("paral_ddp", "paral_fsdp", "paral_zero2", "ddp")
SLOW = 0.05
"""Seconds by which a rank is slower in each step."""


def with_and_without(strategy: str, accumulate: int) -> tuple[Any, Any, dict[str, float]]:
    monitor = ParalMonitor(every_n_steps=2, tokens_per_sample=5, plan=strategy != "ddp")
    measured = fit_regression(5, accumulate, 2, strategy=strategy, callbacks=[monitor])
    return measured, fit_regression(5, accumulate, 2, strategy=strategy), monitor.values


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("strategy", LABELS)
def test_training_is_the_same_with_the_callback(on_ranks, strategy: str, accumulate: int) -> None:
    results = on_ranks(2, with_and_without, strategy, accumulate)
    for (losses, weights), (expected_losses, expected), _ in results:
        assert losses == expected_losses
        assert all(torch.equal(weight, expected[name]) for name, weight in weights.items())
    values, of_other_rank = (values for *_, values in results)

    assert not of_other_rank  # only rank 0 has loggers and a progress bar
    assert min(values[f"paral/{name}_seconds"] for name in ("data", "forward", "backward", "optimizer")) > 0
    assert ("paral/waiting_seconds" in values) == ("ddp" in strategy)
    assert values["paral/tokens_per_second"] == pytest.approx(5 * values["paral/samples_per_second"])
    assert values["paral/samples_per_second"] == pytest.approx(2 * 6 / values["paral/step_seconds"])
    assert values["paral/sent_bytes"] > 0


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


def slow_rank_of(strategy: str, slow_rank: int) -> tuple[int, bool, list[float]] | None:
    monitor = ParalMonitor(every_n_steps=2)
    trainer = quiet_trainer(strategy=strategy, devices=2, max_epochs=1, callbacks=[monitor])
    trainer.fit(Regression(), DataLoader(Samples(slow_rank)))
    if not trainer.is_global_zero:
        return None
    slow = find_slow_rank(monitor.reports)
    assert slow is not None
    return slow.rank, slow.is_slow, [monitor.reports[rank].data for rank in range(2)]


@pytest.mark.parametrize("slow_rank", [0, 1])
@pytest.mark.parametrize("strategy", LABELS)
def test_rank_that_loads_data_slowly_is_named(on_ranks, strategy: str, slow_rank: int) -> None:
    rank, is_slow, data = on_ranks(2, slow_rank_of, strategy, slow_rank)[0]

    assert (rank, is_slow) == (slow_rank, True)
    assert data[slow_rank] > max(SLOW, data[1 - slow_rank])


def logged_fit(folder: str, strategy: str, epochs: int, resume: str | None) -> tuple[int, list[str]]:
    """Fit with a logger and checkpoints; return the number of measured steps, and the logged ones."""
    monitor, version = ParalMonitor(every_n_steps=2), f"epochs-{epochs}"
    trainer = quiet_trainer(
        strategy=strategy,
        devices=2,
        max_epochs=epochs,
        callbacks=[ModelCheckpoint(folder, filename="{epoch}"), monitor],
        logger=CSVLogger(folder, version=version),
        enable_checkpointing=True,
        log_every_n_steps=1,
    )
    trainer.fit(Regression(), regression_data(6, 2), ckpt_path=resume)
    if not trainer.is_global_zero:
        return 0, []
    rows = list(csv.DictReader(Path(folder, "lightning_logs", version, "metrics.csv").read_text().splitlines()))
    assert all(float(row["paral/samples_per_second"]) > 0 for row in rows)
    return sum(report.num_steps for report in monitor.reports.values()), [row["step"] for row in rows]


@pytest.mark.parametrize("strategy", ["paral_ddp", "ddp"])
def test_values_reach_loggers_and_a_resumed_fit_is_measured_anew(on_ranks, tmp_path: Path, strategy: str) -> None:
    assert on_ranks(2, logged_fit, str(tmp_path), strategy, 1, None)[0] == (2 * 5, ["1", "3", "5"])

    checkpoint = str(tmp_path / "epoch=0.ckpt")
    assert on_ranks(2, logged_fit, str(tmp_path), strategy, 2, checkpoint)[0] == (2 * 5, ["7", "9", "11"])


def reports_of_ranks_that_differ(every_n_steps: list[int]) -> tuple[list[int], list[int]]:
    """Return the ranks of which rank 0 knows after its first report and at the end."""
    known: list[list[int]] = []

    class Reader(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 3:
                known.append(sorted(monitor.reports))

    monitor = ParalMonitor(every_n_steps=every_n_steps[dist.get_rank()], print_summary=False)
    fit_regression(6, 1, 2, strategy="paral_ddp", callbacks=[monitor, Reader()])
    return known[0], sorted(monitor.reports)


def test_rank_that_does_not_report_makes_no_rank_wait(on_ranks) -> None:
    assert on_ranks(2, reports_of_ranks_that_differ, [2, 1000])[0] == ([0], [0, 1])
    assert on_ranks(2, reports_of_ranks_that_differ, [1000, 2])[0] == ([], [0, 1])
