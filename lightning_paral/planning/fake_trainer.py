"""A Trainer for a module whose step runs outside of a fit."""

import logging
from typing import Any

from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.loggers.logger import DummyLogger
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightning_paral.compat.lightning.strategies import set_module
from lightning_paral.planning.settings import StepSettings

_STEPS_OF_SCHEDULES = 1000


class PlanningTrainer(Trainer):
    """A Trainer on the CPU without logger, callbacks and data."""

    def __init__(self, settings: StepSettings) -> None:
        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
        super().__init__(
            accelerator="cpu",
            devices=1,
            precision=settings.precision,  # type: ignore[arg-type]  # any text; Lightning checks it
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )

    @property
    def estimated_stepping_batches(self) -> int:
        """A number for learning rate schedules, which do not change what a step allocates."""
        return _STEPS_OF_SCHEDULES


def attach(module: LightningModule, trainer: Trainer, datamodule: LightningDataModule | None) -> None:
    """Give `module` the trainer, and replace its methods that need a running fit.

    Call this only in a process in which `module` is not used for anything else.
    """
    module.trainer = trainer
    set_module(trainer.strategy, module)
    if datamodule is not None:
        vars(trainer)["datamodule"] = datamodule
    trainer.loggers = [DummyLogger()]  # accepts any call, also of its `experiment`
    for name in ("log", "log_dict", "print", "clip_gradients", "toggle_optimizer", "untoggle_optimizer"):
        object.__setattr__(module, name, _do_nothing)
    object.__setattr__(module, "all_gather", _return_first)


def use_optimizers(
    module: LightningModule, optimizers: list[Optimizer], schedulers: list[LRScheduler], backward: Any
) -> None:
    """Make the methods for manual optimization use these objects and this function for the backward pass."""
    module.trainer.strategy.optimizers = optimizers
    object.__setattr__(module, "optimizers", lambda *_, **__: _one_or_all(optimizers))
    object.__setattr__(module, "lr_schedulers", lambda: _one_or_all(schedulers))
    object.__setattr__(module, "manual_backward", backward)


def _one_or_all(found: list[Any]) -> Any:
    """Return what Lightning's methods of the same purpose do."""
    return (found[0] if len(found) == 1 else found) if found else None


def _do_nothing(*_: Any, **__: Any) -> None:
    pass


def _return_first(data: Tensor, *_: Any, **__: Any) -> Tensor:
    return data
