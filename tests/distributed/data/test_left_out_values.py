"""A rank that leaves out a value which the others reduce in a step gets an error that names it, not a hang."""

import time
from typing import Any

import pytest
import torch
from torch import Tensor
from torchmetrics import MeanMetric

from lightning_paral.distributed.process_group import release_process_group
from tests.contract.cases import strategy_of
from tests.launching import leave_pool
from tests.models.linear import Linear, ones
from tests.running import quiet_trainer

LAST = 3
"""The last batch of the epoch, and of the validation."""
ON_STEP: dict[str, Any] = {"on_step": True, "on_epoch": False, "sync_dist": True}


class Logging(Linear):
    """Rank 1 leaves out the value `odd` in batch `odd_batch` of `stage`, or sleeps before it logs it."""

    def __init__(self, stage: str, odd_batch: int, sleeps: float = 0.0) -> None:
        super().__init__()
        self.stage, self.odd_batch, self.sleeps = stage, odd_batch, sleeps
        self.metric = MeanMetric(dist_sync_on_step=True)

    def log_odd(self, stage: str, batch_idx: int) -> None:
        if self.stage == "only metric":
            return
        if stage == self.stage and batch_idx == self.odd_batch and self.global_rank == 1:
            if not self.sleeps:
                return
            time.sleep(self.sleeps)
        self.log("odd", torch.tensor(1.0 + self.global_rank), **ON_STEP)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if not ("metric" in self.stage and batch_idx == self.odd_batch and self.global_rank == 1):
            self.metric(batch.sum())
        if self.stage != "only metric":
            self.log("even", torch.tensor(2.0), **ON_STEP)
        self.log_odd("training", batch_idx)
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Tensor, batch_idx: int) -> None:
        self.log_odd("training end", batch_idx)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.layer(batch)
        self.log_odd("validation", batch_idx)


class LoggingAtEnd(Logging):
    """Rank 1 leaves out the value `odd` in the hook `stage` of epoch `odd_batch`."""

    def log_odd(self, stage: str, batch_idx: int) -> None:
        if stage == self.stage and (self.global_rank == 0 or self.current_epoch != self.odd_batch):
            self.log("odd", torch.tensor(1.0), sync_dist=True)

    def on_train_epoch_end(self) -> None:
        self.log_odd("on_train_epoch_end", 0)

    def on_validation_epoch_end(self) -> None:
        self.log_odd("on_validation_epoch_end", 0)


def fit(label: str, *arguments: Any) -> tuple[str, dict[str, float]]:
    """Fit in a process group that the strategy creates. Return the error of this rank, and the logged values."""
    leave_pool()
    at_end = arguments[0].startswith("on_")
    options = {"max_epochs": 2 if at_end else 1, "num_sanity_val_steps": 0}
    trainer = quiet_trainer(devices=2, strategy=strategy_of(label, timeout=90.0), **options)
    loader = ones(16, 2)
    try:
        if len(arguments) == 1:
            trainer.validate(LoggingAtEnd(*arguments, 0), loader, verbose=False)
        else:
            trainer.fit(LoggingAtEnd(*arguments) if at_end else Logging(*arguments), loader, loader)
        return "", {key: float(value) for key, value in trainer.logged_metrics.items()}
    except Exception as error:
        return f"{type(error).__name__}: {error}", {}
    finally:
        release_process_group(after_failure=True)


@pytest.mark.parametrize(
    ("label", "stage", "batch"),
    [
        ("paral_ddp", "training", 1),
        ("paral_ddp", "training end", 1),
        ("paral_ddp", "validation", LAST),
        ("paral_fsdp", "training", LAST),
        ("paral_fsdp", "validation", 1),
        ("paral_zero2", "training", 1),
        ("paral_zero3", "training", 1),
        ("paral_zero3", "validation", LAST),
    ],
)
def test_value_that_a_rank_leaves_out_is_named(in_own_world, label: str, stage: str, batch: int) -> None:
    hook = {"training": "training_step", "training end": "on_train_batch_end", "validation": "validation_step"}[stage]
    where = f"validation batch {batch}" if stage == "validation" else f"training batch {batch} of epoch 0"

    (first, _), (second, _) = in_own_world(2, fit, label, stage, batch)

    what = f"rank 0 logged '{hook}.odd' with sync_dist=True and rank 1 did not"
    expected = f"The ranks have not synchronized the same values in {where}: {what}. Every rank must log the same keys"
    assert first.startswith(f"ConfigurationError: {expected}")
    assert second.startswith("RankFailedError: Rank 1 ended because rank 0")
    assert f"failed in {where}: lightning_paral.errors.ConfigurationError: {expected}" in second


@pytest.mark.parametrize(
    ("label", "hook", "where"),
    [
        ("paral_ddp", ("on_train_epoch_end", 0), "the hooks at the end of epoch 0"),
        ("paral_fsdp", ("on_train_epoch_end", 1), "the hooks at the end of epoch 1"),  # rank 1 ends the fit
        ("paral_fsdp", ("on_validation_epoch_end", 0), "the hooks at the end of the validation"),
        (
            "paral_ddp",
            ("on_validation_epoch_end",),
            "the hooks at the end of the validation",
        ),  # rank 1 ends the evaluation
    ],
)
def test_value_that_a_rank_leaves_out_at_the_end_is_named(in_own_world, label: str, hook: Any, where: str) -> None:
    (first, _), (second, _) = in_own_world(2, fit, label, *hook)

    what = f"rank 0 logged '{hook[0]}.odd' with sync_dist=True and rank 1 did not"
    if hook[1:] == (0,):
        assert f"ConfigurationError: The ranks have not synchronized the same values in {where}: {what}" in first
        assert second.startswith("RankFailedError: Rank 1 ended because rank 0")
    else:  # the run of rank 1 has ended well, and it has left the process group
        assert what in first or "This rank was reducing self.log('odd', sync_dist=True). Every rank must" in first


@pytest.mark.parametrize(
    ("label", "stage"), [("paral_ddp", "metric"), ("paral_fsdp", "metric"), ("paral_ddp", "only metric")]
)
def test_metric_that_a_rank_does_not_update_is_named(in_own_world, label: str, stage: str) -> None:
    messages = [message for message, _ in in_own_world(2, fit, label, stage, 1)]

    for message in messages:
        assert "The ranks have not synchronized the same values in training batch 1 of epoch 0: rank " in message
        assert "called or computed the metric MeanMetric with dist_sync_on_step=True" in message
        assert "call `metric.update(...)`, which waits for no other rank" in message
        other = "rank 1 logged 'training_step.even' with sync_dist=True" if stage == "metric" else "rank 1 did not"
        assert other in message


@pytest.mark.parametrize("label", ["paral_ddp", "paral_fsdp", "paral_zero3"])
def test_rank_that_is_slow_to_log_is_waited_for(in_own_world, label: str) -> None:
    for error, values in in_own_world(2, fit, label, "training", 1, 8.0):
        assert error == ""
        assert values["odd"] == 1.5
