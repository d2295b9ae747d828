"""A module whose results show whether any sample counts twice or not at all, and functions that evaluate and fit it."""

import random
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import BinaryAccuracy, BinaryAUROC

from lightning_paral import GatherPredictions
from tests.contract.cases import strategy_of
from tests.running import SaveAt, quiet_trainer

FEATURES = 6
SIZES = ((1, 4), (3, 2), (7, 2), (13, 4), (16, 2), (2, 1), (29, 3))
"""Samples and batch size of each loader: among them fewer samples than ranks, and last batches of one sample."""


class Judged(LightningModule):
    """Logs with every reduction, draws random numbers in its steps, and counts its steps in a buffer and in Python."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = dropout
        self.hidden = nn.Linear(FEATURES, 16)
        self.out = nn.Linear(16, 1)
        self.accuracy = nn.ModuleList(BinaryAccuracy() for _ in SIZES)
        self.auroc = nn.ModuleList(BinaryAUROC() for _ in SIZES)
        self.register_buffer("num_calls", torch.zeros(()))
        self.collected: dict[int, list[float]] = {}
        self.num_steps = [0] * len(SIZES)
        self.hooks = 0
        self.losses: list[tuple[float, int]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        return self.out(torch.tanh(self.hidden(x))).squeeze(1)

    def validation_step(self, batch: list[Tensor], batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        inputs, targets = batch
        torch.rand(3), np.random.rand(), random.random()
        self.num_steps[dataloader_idx] += 1
        scores = self(inputs)
        losses = nn.functional.binary_cross_entropy_with_logits(scores, targets.float(), reduction="none")
        self.log("loss", losses.mean(), sync_dist=True)
        self.log("step_loss", losses.mean(), sync_dist=True, on_step=True, on_epoch=True)
        self.log("largest", losses.max(), sync_dist=True, reduce_fx="max")
        self.log("sum", losses.sum(), sync_dist=True, reduce_fx="sum")
        probabilities = scores.sigmoid()  # torchmetrics would guess from each batch whether these are logits
        self.accuracy[dataloader_idx](probabilities, targets)
        self.log("accuracy", self.accuracy[dataloader_idx])
        self.auroc[dataloader_idx].update(probabilities, targets)
        self.log("auroc", self.auroc[dataloader_idx])
        self.collected.setdefault(dataloader_idx, []).extend(inputs[:, 0].tolist())
        return losses

    def on_validation_batch_end(self, *args: Any) -> None:
        self.hooks += 1

    def predict_step(self, batch: list[Tensor], batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        return self(batch[0])

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        inputs, targets = batch
        inputs = nn.functional.dropout(inputs, self.dropout)
        loss = nn.functional.binary_cross_entropy_with_logits(self(inputs), targets.float())
        self.losses.append((loss.item(), len(inputs)))
        self.log("train_loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def judged(dropout: float = 0.0) -> Judged:
    torch.manual_seed(2)
    return Judged(dropout)


def samples(length: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(length)
    inputs = torch.randn(length, FEATURES, generator=generator)
    return TensorDataset(inputs, (inputs.sum(dim=1) + torch.randn(length, generator=generator) > 0).long())


def evaluate(label: str, num_ranks: int, split: str) -> dict[str, Any]:
    """Validate and predict on loaders of all `SIZES`; return logged values, outputs, and the state they leave."""
    model = judged()
    trainer = quiet_trainer(
        strategy=strategy_of(label, split=split), devices=num_ranks, callbacks=[GatherPredictions()]
    )
    loaders = [DataLoader(samples(length), batch_size) for length, batch_size in SIZES]
    torch.manual_seed(11), np.random.seed(11), random.seed(11)
    logged = trainer.validate(model, loaders, verbose=False)
    drawn = torch.rand(1).item(), np.random.rand(), random.random()
    torch.manual_seed(11), np.random.seed(11), random.seed(11)
    for num_steps in model.num_steps:
        torch.empty((), dtype=torch.int64).random_()  # a DataLoader draws its workers' seed
        for _ in range(num_steps if split == "global" else 0):  # others draw numbers of their rank
            torch.rand(3), np.random.rand(), random.random()
    return {
        "logged": logged,
        "collected": model.collected,
        "steps": (sum(model.num_steps), model.hooks, int(model.num_calls)),
        "generators": (drawn, (torch.rand(1).item(), np.random.rand(), random.random())),
        "states_empty": all(metric.preds == [] for metric in model.auroc),
        "predictions": trainer.predict(model, loaders),
    }


def train(label: str, num_ranks: int, options: dict[str, Any], trainer_options: dict[str, Any]) -> dict[str, Any]:
    """Fit two epochs of shuffled batches, the last one smaller; return losses, weights and the last metrics."""
    model = judged(trainer_options.pop("dropout", 0.0))
    fit = {key: trainer_options.pop(key) for key in ("ckpt_path",) if key in trainer_options}
    save_at = trainer_options.pop("save_at", None)
    callbacks = [SaveAt(*save_at)] if save_at else []
    settings = {"max_epochs": 2, "devices": num_ranks, "callbacks": callbacks} | trainer_options
    trainer = quiet_trainer(strategy=strategy_of(label, **options), **settings)
    loader = DataLoader(samples(37), 8, shuffle=True)
    trainer.fit(model, loader, DataLoader(samples(13), 4), **fit)
    return {
        "losses": model.losses,
        "weights": {name: value.detach().clone() for name, value in model.named_parameters()},
        "metrics": {name: value.item() for name, value in trainer.callback_metrics.items()},
        "global_step": trainer.global_step,
    }
