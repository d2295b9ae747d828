"""Projects for `check`: a sound one, and those that do something else on several ranks than in one process."""

import time
from typing import Any

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

FEATURES = 6


class Sound(LightningModule):
    """Two layers with dropout, trained with momentum."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Dropout(0.3), nn.Linear(16, 1))
        self.register_buffer("mean", torch.zeros(()))
        self.register_buffer("is_seen", torch.ones(2, dtype=torch.bool))

    def loss(self, batch: list[Tensor]) -> Tensor:
        inputs, targets = batch
        return nn.functional.mse_loss(self.layers(inputs), targets)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class ScaledGradient(Sound):
    def on_after_backward(self) -> None:
        if self.trainer.world_size > 1:
            for parameter in self.parameters():
                assert parameter.grad is not None
                parameter.grad.mul_(1.01)


class BufferOfRank(Sound):
    """Has a mask as well, whose infinite values must not widen the tolerance for other buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.full((2, 2), float("-inf")))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.mean = batch[0].mean()
        return super().training_step(batch, batch_idx)


class LogDividedTwice(Sound):
    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch) / self.trainer.world_size, sync_dist=True)


class WritesOnOneRank(Callback):
    """Writes a parameter on rank 1 only."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if trainer.global_rank == 1 and trainer.global_step == 3:
            pl_module.layers[3].weight.data[0, 3] += 0.03


class Forgets(Sound):
    """Counts its steps in an attribute, which no checkpoint has."""

    num_steps = 0

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.num_steps += 1
        return super().training_step(batch, batch_idx) * self.num_steps


class LosesMomentum(Sound):
    """Resumes with a state of the optimizer that is zero."""

    def on_train_start(self) -> None:
        if self.trainer.global_step > 0:
            for state in self.optimizers().state.values():  # type: ignore[union-attr]
                state["momentum_buffer"].zero_()


class CountsTwice(Sound):
    """Evaluates with a DistributedSampler, which repeats samples so that all ranks have the same number."""

    def train_dataloader(self) -> Any:
        return data()[0]

    def val_dataloader(self) -> Any:
        dataset = samples(19, 2)
        sampler = DistributedSampler(dataset, self.trainer.world_size, self.trainer.global_rank, shuffle=False)
        return DataLoader(dataset, 8, sampler=sampler)


class WithBatchNorm(Sound):
    def __init__(self) -> None:
        super().__init__()
        self.layers[1] = nn.BatchNorm1d(16)


class Unordered(Sound):
    """Draws from a generator without a seed."""

    def train_dataloader(self) -> Any:
        generator = torch.Generator()
        generator.seed()
        return DataLoader(samples(48, 1), 12, shuffle=True, generator=generator)


class LogsTime(Sound):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.log("seconds", time.perf_counter() % 1, sync_dist=True)
        return super().training_step(batch, batch_idx)


class InFloat32(Sound):
    """Cannot train in fp64."""

    def loss(self, batch: list[Tensor]) -> Tensor:
        return super().loss([batch[0].float(), batch[1].float()])


class LossInFloat32(Sound):
    """Computes its loss in fp32, whatever the precision is, as models of transformers do."""

    def loss(self, batch: list[Tensor]) -> Tensor:
        inputs, targets = batch
        return nn.functional.mse_loss(self.layers(inputs).float(), targets.float())


class Noisy(Sound):
    """Draws noise in a step."""

    def loss(self, batch: list[Tensor]) -> Tensor:
        inputs, targets = batch
        return super().loss([inputs + 0.1 * torch.randn_like(inputs), targets])


class Augmented(TensorDataset):
    """Draws noise for each sample."""

    def __getitem__(self, index: int) -> Any:
        inputs, targets = super().__getitem__(index)
        return inputs + 0.1 * torch.randn_like(inputs), targets


def augmented() -> Any:
    return DataLoader(Augmented(*samples(48, 1).tensors), 12)


class NeedsGPU(Sound):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return super().training_step([tensor.cuda() for tensor in batch], batch_idx)


class Hangs(Sound):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if self.trainer.global_rank == 1:
            time.sleep(1000)
        return super().training_step(batch, batch_idx)


def samples(number: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(number, FEATURES, generator=generator)
    return TensorDataset(inputs, inputs.sum(dim=1, keepdim=True).sin())


def data() -> tuple[Any, Any]:
    """Return loaders with four training batches, and with an odd number of samples for validation."""
    return DataLoader(samples(48, 1), 12, shuffle=True), DataLoader(samples(19, 2), 8)


class Samples(LightningDataModule):
    def train_dataloader(self) -> Any:
        return data()[0]

    def val_dataloader(self) -> Any:
        return data()[1]


def too_few() -> Any:
    """Return a loader that drops all of its samples."""
    return DataLoader(samples(4, 1), 12, drop_last=True)


def single() -> Any:
    """Return a loader with one sample per batch."""
    return DataLoader(samples(8, 1), 1)
