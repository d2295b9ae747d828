"""Fit a module of a row, and return all results to compare."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from tests.contract.tables.run import SEED, Losses, Mean, OfEach, Run, plain
from tests.contract.user_code.models import Loaders, regression

HYPERPARAMETERS = ("lr", "weight_decay", "momentum", "betas")


class Keep(Losses):
    """Also saves a checkpoint at the end of training, and records values that are gone after the run."""

    def __init__(self) -> None:
        super().__init__()
        self.path: Path | None = None
        self.metrics: dict[str, float] = {}
        self.groups: list[Any] = []

    def on_train_end(self, trainer: Trainer, module: LightningModule) -> None:
        self.path = Path(trainer.default_root_dir, f"saved-{trainer.max_epochs}")
        trainer.save_checkpoint(self.path)
        self.metrics |= {key: float(value) for key, value in trainer.callback_metrics.items()}
        groups = [optimizer.param_groups for optimizer in trainer.optimizers]
        self.groups = [[{k: group[k] for k in HYPERPARAMETERS if k in group} for group in each] for each in groups]


@dataclass(frozen=True, kw_only=True)
class Fit:
    """A scenario: fit a module, in one run or in two."""

    module: Callable[[], LightningModule]
    """A function that returns the module. It is called after the seed is set."""
    callbacks: Callable[[], list[Callback]] = list
    """A function that returns the user's callbacks."""
    trainer: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the Trainer, which trains for one epoch by default."""
    loaders: Loaders = regression
    """A function of rank and number of ranks that returns the loaders for `fit`."""
    resumed: bool = False
    """Whether the run is interrupted: fit one epoch, save, resume with a new module, and fit the second epoch. The
    reference fits both epochs at once."""

    def __call__(self, run: Run) -> dict[str, Any]:
        last = self.trainer.get("max_epochs", 2 if self.resumed else 1)
        keep = Keep()
        seen: list[Any] = []
        for max_epochs in (last - 1, last) if self.resumed and run.num_devices > 1 else (last,):
            module = run.module(self.module)
            trainer = run.trainer(**self.trainer | {"max_epochs": max_epochs}, callbacks=[*self.callbacks(), keep])
            torch.manual_seed(SEED)
            # Rows save objects of any type in checkpoints.
            trainer.fit(module, ckpt_path=keep.path, weights_only=False, **run.data(self.loaders))
            seen += plain(getattr(module, "seen", []))
        weights = plain(dict(module.state_dict()))
        buffers = {name: weights.pop(name) for name, _ in module.named_buffers() if name in weights}
        assert keep.path is not None
        checkpoint = run.saved(keep.path)
        if checkpoint.value is not None:
            checkpoint.value.pop("callbacks", None)
        return {
            "losses": Mean(keep.losses),
            "weights": weights,
            "buffers": OfEach(buffers),
            "seen": seen,
            "groups": keep.groups,
            "metrics": Mean(keep.metrics),
            "checkpoint": checkpoint,
        }
