"""A module whose fit can be resumed anywhere, and functions that fit it, save and resume."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_paral import CheckpointError, CheckpointOptions
from tests.contract.cases import strategy_of
from tests.running import quiet_trainer

Losses = dict[int, float]

GLOBAL_BATCH_SIZE = 8
FEATURES = 5
NUM_BATCHES = 10
SAVED_AFTER = 4
"""The number of batches before the checkpoint is saved: two optimizer steps, inside an epoch."""


def batch(number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    inputs = torch.randn(GLOBAL_BATCH_SIZE, FEATURES, generator=generator)
    return inputs, torch.stack([inputs.sum(dim=1), inputs.prod(dim=1), inputs[:, 0]], dim=1)


def scheduled_adamw(module: nn.Module) -> Any:
    """Return AdamW with two parameter groups, and a scheduler of its steps."""
    trained = [p for p in module.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.3, "lr": 2e-2},
        {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.3 * step))
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Resumable(LightningModule):
    """Tied, frozen and 0-dimensional parameters, buffers, two parameter groups, a scheduler.

    A batch depends on its number only.
    """

    def __init__(self, scalar: bool = True) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 7)
        self.norm = nn.BatchNorm1d(7, affine=False)
        self.frozen = nn.Linear(7, 7).requires_grad_(False)
        self.second = nn.Linear(7, 7)
        self.tied = nn.Linear(7, 7)
        self.tied.weight = self.second.weight
        self.out = nn.Linear(7, 3)
        self.scale = nn.Parameter(torch.tensor(1.3) if scalar else torch.tensor([1.3]))
        self.losses: dict[int, float] = {}

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.norm(self.first(x))  # its buffers change, differ between ranks, and do not affect the loss
        hidden = self.frozen(torch.tanh(self.first(x)))
        return self.out(self.tied(torch.tanh(self.second(hidden)))) * self.scale

    def training_step(self, _: Any, batch_idx: int) -> Tensor:
        rank, world_size = self.trainer.global_rank, self.trainer.world_size
        inputs, targets = (part[rank::world_size].to(self.device, self.dtype) for part in batch(batch_idx))
        loss = nn.functional.mse_loss(self(inputs), targets)
        self.losses[batch_idx] = loss.item()
        return loss

    def configure_optimizers(self) -> Any:
        return scheduled_adamw(self)


class SaveOnce(Callback):
    """Saves after a number of batches."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx + 1 == SAVED_AFTER:
            trainer.save_checkpoint(self.path)


def fit(
    strategy: Any,
    world_size: int,
    *,
    save_to: str | Path | None = None,
    resume_from: str | Path | None = None,
    weights_only: bool | None = None,
    num_batches: int = NUM_BATCHES,
    module: LightningModule | Callable[[], LightningModule] = Resumable,
    **trainer_options: Any,
) -> Any:
    """Fit, save after `SAVED_AFTER` batches if `save_to` is given, and return the module.

    A function given as `module` is called when the generators have been seeded.
    """
    torch.manual_seed(3)
    module = module if isinstance(module, LightningModule) else module()
    callbacks = trainer_options.pop("callbacks", []) + ([SaveOnce(str(save_to))] if save_to else [])
    options = {"max_epochs": 1, "accumulate_grad_batches": 2, "callbacks": callbacks} | trainer_options
    options["use_distributed_sampler"] = False
    trainer = quiet_trainer(devices=world_size, strategy=strategy, **options)
    batches: Any = range(num_batches)  # the same on every rank: the module makes a batch from its number
    path = None if resume_from is None else str(resume_from)
    trainer.fit(module, DataLoader(batches), ckpt_path=path, weights_only=weights_only)
    return module


def losses(
    strategy: Any, make: Callable[[], LightningModule] = Resumable, *, checkpoint: Any = None, **options: Any
) -> Losses:
    """Fit what `make` returns on all ranks of the pool, or on one device outside of it; return this rank's losses.

    Args:
        strategy: the label of a case or a function that returns a strategy.
        make: returns the module. The generators have the same seed in every call.
        checkpoint: the options of `CheckpointOptions`, or its `form`.
        **options: those of `fit`.
    """
    more = {"form": checkpoint} if isinstance(checkpoint, str) else checkpoint
    given = {} if more is None else {"checkpoint": CheckpointOptions(**more)}
    made = strategy(**given) if callable(strategy) else strategy_of(strategy, **given)
    found: Losses = fit(made, int(os.environ.get("WORLD_SIZE", "1")), module=make, **options).losses
    return found


def refusal(*args: Any, **options: Any) -> str:
    """Return the message of the `CheckpointError` that the fit of `losses` raises."""
    with pytest.raises(CheckpointError) as raised:
        losses(*args, **options)
    return str(raised.value)


def mean_losses(ranks: list[Losses]) -> Losses:
    return {number: sum(losses[number] for losses in ranks) / len(ranks) for number in ranks[0]}


def assert_continues(ranks: list[Losses], whole: list[Losses], tolerance: float = 1e-5, about: str = "") -> None:
    """Assert that `ranks`, which have resumed, have the mean losses of those of the whole run after the save."""
    found, expected = mean_losses(ranks), mean_losses(whole)
    assert list(found) == list(range(SAVED_AFTER, NUM_BATCHES))
    for number, loss in found.items():
        assert loss == pytest.approx(expected[number], rel=tolerance), f"{about}, batch {number}"
