"""Samples that equal their indices, a module that records which it gets, and a function that fits it on all ranks."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_paral import ParalDDPStrategy
from tests.running import quiet_trainer


class Indices(Dataset[int]):
    """Samples equal to their indices, so that a batch shows which were drawn."""

    def __init__(self, length: int, num_seen: int = 0) -> None:
        self.length, self.num_seen = length, num_seen

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Tensor:
        assert index >= self.num_seen, "a sample was loaded that was trained on before"
        return torch.tensor(float(index))


class Stream(IterableDataset[float]):
    def __init__(self, length: int, divided: bool = False) -> None:
        self.length, self.divided = length, divided

    def __iter__(self) -> Iterator[float]:
        start, step = (dist.get_rank(), dist.get_world_size()) if self.divided else (0, 1)
        yield from map(float, range(start, self.length, step))


class Recorder(LightningModule):
    """Records every batch by loader."""

    def __init__(self, log_steps: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.trained: list[Any] = []
        self.evaluated: dict[int, list[Any]] = {}
        self.log_steps = log_steps

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        parts = batch if isinstance(batch, list | tuple) else [batch]
        self.trained.append([part.tolist() for part in parts] if len(parts) > 1 else parts[0].tolist())
        mean = torch.stack([part.float().mean() for part in parts]).mean()
        self.log("train", mean.detach(), on_step=False, on_epoch=True, sync_dist=True, batch_size=parts[0].numel())
        return self.weight * mean * 1e-3

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.evaluated.setdefault(dataloader_idx, []).append(batch.tolist())
        self.log("mean", batch.float().mean(), sync_dist=True, on_step=self.log_steps, on_epoch=True)
        self.log("own", batch.float().mean(), batch_size=batch.numel())

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return batch * self.weight.detach()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        self.num_steps = self.trainer.estimated_stepping_batches  # creates the loaders before a checkpoint is loaded
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trainer_of(split: str = "batch", remainder: str = "wrap", shard_iterable: bool = True, **options: Any) -> Any:
    strategy = ParalDDPStrategy(split=split, remainder=remainder, shard_iterable=shard_iterable)  # type: ignore[arg-type]
    return quiet_trainer(**({"strategy": strategy, "devices": dist.get_world_size(), "max_epochs": 1} | options))


def fit(loader: Any, validation: Any = None, ckpt_path: Any = None, **options: Any) -> Recorder:
    """Fit on `loader`, by default for one epoch. Assert that the user's loader stays as it is."""
    model, trainer, before = Recorder(), trainer_of(**options), getattr(loader, "batch_sampler", None)
    trainer.fit(model, loader, validation, ckpt_path=ckpt_path)
    if isinstance(loader, DataLoader):
        assert loader.batch_sampler is before
    model.metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
    return model


def flat(batches: Any) -> list[float]:
    return [sample for item in batches for sample in (flat(item) if isinstance(item, list) else [item])]
