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
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_paral import ParalMonitor
from lightning_paral.callbacks.monitoring.slow_rank import find_slow_rank
from tests.models.regression import FEATURES, Regression, fit_regression, regression_data
from tests.running import quiet_trainer
from tests.unit.cli.test_commands import run

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


class SlowForward(Regression):
    """Takes longer in the forward pass on one rank."""

    slow_rank = -1

    def forward(self, x: Tensor) -> Tensor:
        if dist.get_rank() == self.slow_rank:
            time.sleep(SLOW)
        return super().forward(x)


def slow_rank_of(strategy: str, where: str, slow_rank: int) -> tuple[int, bool, list[float | None], list[float]] | None:
    monitor = ParalMonitor(every_n_steps=2)
    trainer = quiet_trainer(strategy=strategy, devices=2, max_epochs=1, callbacks=[monitor])
    module = SlowForward()
    module.slow_rank = slow_rank if where == "forward" else -1
    trainer.fit(module, DataLoader(Samples(slow_rank if where == "data" else -1)))
    if not trainer.is_global_zero:
        return None
    slow = find_slow_rank(monitor.reports)
    assert slow is not None
    ranks = [monitor.reports[rank] for rank in range(2)]
    return slow.rank, slow.is_slow, [report.waiting for report in ranks], [report.data for report in ranks]


@pytest.mark.parametrize("slow_rank", [0, 1])
@pytest.mark.parametrize("strategy", LABELS)
def test_rank_that_loads_data_slowly_is_named(on_ranks, strategy: str, slow_rank: int) -> None:
    rank, is_slow, waiting, data = on_ranks(2, slow_rank_of, strategy, "data", slow_rank)[0]

    assert (rank, is_slow) == (slow_rank, True)
    assert data[slow_rank] > max(SLOW, data[1 - slow_rank])
    if "ddp" in strategy:
        assert waiting[1 - slow_rank] > waiting[slow_rank]


@pytest.mark.parametrize("strategy", ["paral_ddp", "ddp", "paral_zero2"])
def test_rank_with_a_slow_forward_pass_is_named(on_ranks, strategy: str) -> None:
    assert on_ranks(2, slow_rank_of, strategy, "forward", 1)[0][:2] == (1, True)


class Logging(Regression):
    """Logs its loss."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        return loss


def logged_fit(folder: str, strategy: str, monitor: bool, epochs: int, resume: str | None) -> tuple[Any, int]:
    """Fit with a logger and checkpoints; return the contents of a checkpoint, and the number of measured steps."""
    torch.manual_seed(0)
    checkpoints = ModelCheckpoint(Path(folder, "checkpoints"), monitor="loss", save_top_k=-1, filename="{epoch}")
    callbacks: list[Callback] = [checkpoints]
    measured = ParalMonitor(every_n_steps=2)
    trainer = quiet_trainer(
        strategy=strategy,
        devices=2,
        max_epochs=epochs,
        callbacks=[*callbacks, measured] if monitor else callbacks,
        logger=CSVLogger(folder, version="resumed" if resume else "first"),
        enable_checkpointing=True,
        log_every_n_steps=1,
    )
    trainer.fit(Logging(), regression_data(6, 2), ckpt_path=resume)
    assert checkpoints.best_model_score is not None
    keys = set(trainer._checkpoint_connector.dump_checkpoint(weights_only=False)["callbacks"])
    metrics = sorted(trainer.callback_metrics)
    return (keys, metrics), sum(report.num_steps for report in measured.reports.values())


def rows_of(folder: Path, version: str) -> list[dict[str, str]]:
    with (folder / "lightning_logs" / version / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("strategy", ["paral_ddp", "ddp"])
def test_values_reach_loggers_and_a_resumed_fit_is_measured_anew(on_ranks, tmp_path: Path, strategy: str) -> None:
    seen, num_steps = on_ranks(2, logged_fit, str(tmp_path / "with"), strategy, True, 1, None)[0]
    expected, _ = on_ranks(2, logged_fit, str(tmp_path / "without"), strategy, False, 1, None)[0]
    rows = rows_of(tmp_path / "with", "first")
    measured = [row for row in rows if row["paral/step_seconds"]]

    assert seen == expected  # keys of checkpoints and of callback_metrics
    assert num_steps == 2 * 5
    assert [row["step"] for row in measured] == ["1", "3", "5"]
    assert all(float(row["paral/samples_per_second"]) > 0 for row in measured)
    own = [(row["step"], row["loss"]) for row in rows if row["loss"]]
    assert own == [(row["step"], row["loss"]) for row in rows_of(tmp_path / "without", "first") if row["loss"]]

    checkpoint = str(tmp_path / "with/checkpoints/epoch=0.ckpt")
    _, num_steps = on_ranks(2, logged_fit, str(tmp_path / "with"), strategy, True, 2, checkpoint)[0]
    resumed = [row["step"] for row in rows_of(tmp_path / "with", "resumed") if row["paral/step_seconds"]]

    assert num_steps == 2 * 5  # of the second epoch only
    assert resumed == ["7", "9", "11"]


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


def test_yaml(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = {"every_n_steps": 1, "tokens_per_sample": 16, "flops_per_step": 1e9, "peak_flops": 9.89e14}
    callbacks = [
        {"class_path": "lightning_paral.ParalMonitor", "init_args": options},
        {"class_path": "tests.unit.cli.test_commands.Witness"},
    ]
    trainer = run(monkeypatch, tmp_path, "fit", strategy="paral_ddp", callbacks=callbacks)
    (monitor,) = (callback for callback in vars(trainer)["callbacks"] if isinstance(callback, ParalMonitor))

    assert monitor.options.peak_flops == 9.89e14
    assert monitor.values["paral/tokens_per_second"] == pytest.approx(16 * monitor.values["paral/samples_per_second"])
    assert "tokens/s" in capsys.readouterr().out
