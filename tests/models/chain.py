"""A module whose blocks form a chain, and functions that fit it on ranks of which some draw the same samples."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.models.resumable import scheduled_adamw
from tests.running import quiet_trainer

GLOBAL_BATCH_SIZE = 12
FEATURES = 5
WIDTH = 7
NUM_BLOCKS = 4
NUM_BATCHES = 10
SAVED_AFTER = 4
"""The number of batches before the checkpoint is saved: two optimizer steps, inside an epoch."""


def loader(num_batches: int) -> DataLoader[tuple[Tensor, ...]]:
    """Return a loader of global batches, which strategies with `split="global"` divide among the data ranks."""
    inputs = torch.randn(num_batches * GLOBAL_BATCH_SIZE, FEATURES, generator=torch.Generator().manual_seed(7))
    targets = torch.stack([inputs.sum(dim=1), inputs.prod(dim=1), inputs[:, 0]], dim=1)
    return DataLoader(TensorDataset(inputs, targets), GLOBAL_BATCH_SIZE)


class Regression(LightningModule):
    """Steps and optimizers for a module that maps inputs of `loader` to its targets."""

    logs_calls = True
    """Whether to log how often the step is called, which is once per micro-batch in a pipeline."""

    def _loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        inputs, targets = batch
        return nn.functional.mse_loss(self(inputs), targets)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = self._loss(batch)
        self.log("train_loss", loss, on_epoch=True, sync_dist=True)
        if self.logs_calls:
            self.log("calls", 1.0, reduce_fx="sum", on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self._loss(batch), sync_dist=True)

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        return scheduled_adamw(self)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor, shift: Tensor | None = None) -> Tensor:
        if self.training:
            self.calls.fill_(1.0)
        x = x if shift is None else x + shift
        return x + torch.tanh(self.inner(x))


class Chain(Regression):
    """Blocks in a chain, one of them frozen; outside of it, parameters before, after, on both sides and never used."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_BLOCKS))
        self.blocks[1].requires_grad_(False)
        self.shift = nn.Parameter(torch.full((WIDTH,), 0.1))
        self.back = nn.Linear(WIDTH, FEATURES, bias=False)
        self.out = nn.Linear(WIDTH, 3)
        self.scale = nn.Parameter(torch.tensor(1.3))
        self.never = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x)) * self.scale
        for block in self.blocks:
            x = block(x, self.shift)
        return self.out(torch.tanh(self.first(self.back(x)))) * self.scale


class Losses(Callback):
    """Keeps the loss of each batch, and saves after a number of batches."""

    def __init__(self, path: str | None = None) -> None:
        self.path = path
        self.of_batch: dict[int, float] = {}

    @property
    def values(self) -> list[float]:
        """The losses in order, of one epoch."""
        return list(self.of_batch.values())

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.of_batch[batch_idx] = float(outputs["loss"]) * trainer.accumulate_grad_batches
        if self.path is not None and batch_idx + 1 == SAVED_AFTER:
            trainer.save_checkpoint(self.path)


def fit_chain(
    strategy: Any,
    world_size: int,
    *,
    module: LightningModule | Callable[[], LightningModule] | None = None,
    save_to: str | Path | None = None,
    resume_from: str | Path | None = None,
    num_batches: int = NUM_BATCHES,
    **trainer_options: Any,
) -> tuple[dict[int, float], LightningModule, Trainer]:
    """Fit; return the loss of each batch on this rank, the module and the Trainer.

    A function given as `module` is called when the generators have been seeded.
    """
    torch.manual_seed(3)
    module = module if isinstance(module, LightningModule) else (module or Chain)()
    losses = Losses(None if save_to is None else str(save_to))
    options = {"max_epochs": 1, "accumulate_grad_batches": 2, "gradient_clip_val": 0.5} | trainer_options
    trainer = quiet_trainer(devices=world_size, strategy=strategy, callbacks=[losses], **options)
    batches = loader(num_batches)
    trainer.fit(
        module, batches, batches, ckpt_path=None if resume_from is None else str(resume_from), weights_only=False
    )
    return losses.of_batch, module, trainer


Result = tuple[list[float], dict[str, Tensor], dict[str, float]]
"""The losses, the weights and the metrics of a fit."""


def result_of_fit(strategy: Any, world_size: int, **options: Any) -> Result:
    """Call `fit_chain`, and return what is compared between runs."""
    losses, module, trainer = fit_chain(strategy, world_size, **options)
    weights = {name: value.detach().cpu().clone() for name, value in module.state_dict().items()}
    return list(losses.values()), weights, {name: float(value) for name, value in trainer.callback_metrics.items()}


def assert_equal_to(expected: Result, ranks: list[Result]) -> None:
    """Assert that ranks, which drew parts of the same batches, have the mean losses, weights and metrics of one run."""
    expected_losses, expected_weights, expected_metrics = expected
    assert len(expected_losses) == NUM_BATCHES
    mean = torch.tensor([losses for losses, _, _ in ranks]).mean(dim=0)
    torch.testing.assert_close(mean, torch.tensor(expected_losses), rtol=1e-5, atol=0.0)
    for _, weights, metrics in ranks:
        assert weights.keys() == expected_weights.keys()
        for name, weight in weights.items():
            assert (weight - expected_weights[name]).abs().max() <= 1e-5, name
        for name in ("train_loss_epoch", "val_loss"):
            assert metrics[name] == pytest.approx(expected_metrics[name], rel=1e-5), name
