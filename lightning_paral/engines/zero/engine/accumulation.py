"""Schedules of gradient accumulation, which Lightning refuses every DeepSpeedStrategy."""

from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler

from lightning_paral.compat.lightning.accumulation import replace_check
from lightning_paral.errors import ConfigurationError


def allow_accumulation_schedules(trainer: Trainer) -> None:
    """Let `GradientAccumulationScheduler` work in the fit that follows."""
    # The callback refuses every DeepSpeedStrategy in `on_train_start`, a check it shares with those that matter here.
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, GradientAccumulationScheduler):
            replace_check(callback, _check_accumulation_schedule)


def _check_accumulation_schedule(callback: GradientAccumulationScheduler, trainer: Trainer, module: Any) -> None:
    if not module.automatic_optimization:
        raise ConfigurationError("GradientAccumulationScheduler works with automatic optimization only. Remove one.")
    if trainer.accumulate_grad_batches != 1:
        raise ConfigurationError(
            f"Trainer(accumulate_grad_batches={trainer.accumulate_grad_batches}) and GradientAccumulationScheduler "
            "both say how many batches make a step. Remove one."
        )
