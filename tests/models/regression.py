"""A small model and its data, with which training under every strategy equals training in one process."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from tests.running import quiet_trainer

GLOBAL_BATCH_SIZE = 12
FEATURES = 8
Fitted = tuple[list[float], dict[str, Tensor]]
"""Losses and weights."""


class Regression(LightningModule):
    """Two layers fitted to a fixed function. No gradient is truly zero: Adam would amplify its rounding errors."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(FEATURES, 32)
        self.out = nn.Linear(32, 2)
        self.losses: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.hidden(x)))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        inputs, targets = batch
        loss = nn.functional.mse_loss(self(inputs), targets)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def samples(num_batches: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(num_batches * GLOBAL_BATCH_SIZE, FEATURES, generator=generator)
    return TensorDataset(inputs, torch.stack([inputs.sum(dim=1), inputs.prod(dim=1)], dim=1))


def regression_data(num_batches: int, num_ranks: int) -> DataLoader[tuple[Tensor, ...]]:
    """Return a loader of this rank's samples of `num_batches` global batches, in order."""
    dataset = samples(num_batches)
    # Strategies do not replace a DistributedSampler, so each rank draws the same samples under all of them.
    rank = dist.get_rank() if dist.is_initialized() else 0
    sampler = DistributedSampler(dataset, num_ranks, rank, shuffle=False)
    return DataLoader(dataset, GLOBAL_BATCH_SIZE // num_ranks, sampler=sampler)


def fit(make: Callable[[], Any], num_batches: int, num_ranks: int, **options: Any) -> Fitted:
    """Fit what `make` returns for an epoch; return this rank's losses and the final weights."""
    torch.manual_seed(3)
    model = make()
    trainer = quiet_trainer(**({"max_epochs": 1, "devices": num_ranks} | options))
    trainer.fit(model, regression_data(num_batches, num_ranks))
    return model.losses, {name: weight.detach().cpu().clone() for name, weight in model.state_dict().items()}


def fit_regression(num_steps: int, accumulate: int, num_ranks: int, **trainer_options: Any) -> Fitted:
    """Train for `num_steps` steps; return this rank's losses and the final weights.

    With accumulation, the last accumulation window lacks a batch.
    """
    torch.manual_seed(3)
    model = Regression()
    num_batches = num_steps * accumulate - (1 if accumulate > 1 else 0)
    options = {"max_epochs": 1, "gradient_clip_val": 0.1, "devices": num_ranks} | trainer_options
    trainer = quiet_trainer(accumulate_grad_batches=accumulate, **options)
    trainer.fit(model, regression_data(num_batches, num_ranks))
    assert trainer.global_step == num_steps
    return model.losses, {name: weight.detach().cpu().clone() for name, weight in model.state_dict().items()}
