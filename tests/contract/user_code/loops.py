"""Rows about loaders, schedulers and loops."""

from typing import Any

import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.utilities import CombinedLoader
from torch import nn
from torch.optim import lr_scheduler

from tests.contract.user_code.models import Manual, Supervised, loader, regression, samples, validated
from tests.contract.user_code.rows import add, row


def several(rank: int, num_ranks: int) -> dict[str, Any]:
    """A dict of two loaders to train on, the shorter one cycled."""
    long = loader(*samples(4, 7), rank=rank, num_ranks=num_ranks)
    short = loader(*samples(2, 9), rank=rank, num_ranks=num_ranks)
    return {"train_dataloaders": CombinedLoader({"a": long, "b": short}, "max_size_cycle")}


def several_validated(rank: int, num_ranks: int) -> dict[str, Any]:
    """Two loaders to validate on."""
    loaders = [loader(*samples(count, 20 + count), rank=rank, num_ranks=num_ranks) for count in (1, 3)]
    return regression(rank, num_ranks) | {"val_dataloaders": loaders}


def shortest(rank: int, num_ranks: int) -> dict[str, Any]:
    """A list of two loaders; the epoch ends with the shorter one."""
    loaders = [loader(*samples(count, count), rank=rank, num_ranks=num_ranks) for count in (2, 4)]
    return {"train_dataloaders": CombinedLoader(loaders, "min_size")}


@row("loaders in a dict", loaders=several)
class DictLoaders(Supervised):
    """CombinedLoader of a dict, batch["a"] and batch["b"] (labelled and unlabelled)."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch["a"]) + 0.5 * self.loss(batch["b"])


@row("loaders in a list", loaders=shortest)
class ListOfLoaders(Supervised):
    """CombinedLoader of a list, mode="min_size"."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        first, second = batch
        return self.loss(first) + 0.5 * self.loss(second)


@row("loaders, several to validate", loaders=several_validated)
class SeveralValidated(Supervised):
    """Two validation loaders, self.log with dataloader_idx."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        self.log("val", self.loss(batch), sync_dist=True)
        self.log(f"own_{dataloader_idx}", self.loss(batch), sync_dist=True, add_dataloader_idx=False)


row(
    "validation within the epoch",
    sentence="Trainer(val_check_interval=2, num_sanity_val_steps=1).",
    loaders=validated,
    trainer={"val_check_interval": 2, "num_sanity_val_steps": 1},
)(Supervised)


def per_step(scheduler: Any, **more: Any) -> dict[str, Any]:
    return {"scheduler": scheduler, "interval": "step"} | more


def warmed_up(optimizer: Any) -> Any:
    parts = [lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 3), lr_scheduler.ExponentialLR(optimizer, 0.9)]
    return lr_scheduler.SequentialLR(optimizer, parts, milestones=[3])


SCHEDULERS: dict[str, Any] = {
    "StepLR per epoch": lambda o: lr_scheduler.StepLR(o, 1, 0.5),
    "OneCycleLR per step": lambda o: per_step(lr_scheduler.OneCycleLR(o, 0.1, total_steps=8)),
    "CosineAnnealingLR per 2 steps": lambda o: per_step(lr_scheduler.CosineAnnealingLR(o, 4), frequency=2),
    "LambdaLR per step": lambda o: per_step(lr_scheduler.LambdaLR(o, lambda step: 1 / (step + 1))),
    "SequentialLR per step": lambda o: per_step(warmed_up(o)),
    "CyclicLR per step": lambda o: per_step(lr_scheduler.CyclicLR(o, 0.01, 0.05, 2)),
    "ReduceLROnPlateau": lambda o: {
        "scheduler": lr_scheduler.ReduceLROnPlateau(o, patience=0, threshold=0.9),
        "monitor": "val_loss",
    },
}


def scheduled(make: Any) -> type[Supervised]:
    class Scheduled(Supervised):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            return {"optimizer": optimizer, "lr_scheduler": make(optimizer)}

        def on_train_batch_end(self, *args: Any) -> None:
            self.seen.append([group["lr"] for group in self.trainer.optimizers[0].param_groups])

    return Scheduled


for name, make in SCHEDULERS.items():
    add(
        f"scheduler {name}",
        f"{name} in configure_optimizers.",
        scheduled(make),
        loaders=validated,
        trainer={"max_epochs": 2},
    )
add(
    "scheduler resumed",
    "OneCycleLR per step, over a resume.",
    scheduled(SCHEDULERS["OneCycleLR per step"]),
    loaders=validated,
    resumed=True,
)


@row("scheduler stepped by hand, manual")
class ManualScheduler(Manual):
    """self.lr_schedulers().step() in manual optimization."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [lr_scheduler.StepLR(optimizer, 1, 0.5)]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.lr_schedulers().step()
        return loss


@row("scheduler step overridden")
class OwnStep(Supervised):
    """lr_scheduler_step(self, scheduler, metric) overridden."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [{"scheduler": lr_scheduler.StepLR(optimizer, 2, 0.5), "interval": "step"}]

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        scheduler.step(epoch=self.trainer.global_step + 1)


row(
    "callback GradientAccumulationScheduler",
    sentence="GradientAccumulationScheduler({0: 1, 1: 3}).",
    trainer={"max_epochs": 2},
    callbacks=lambda: [GradientAccumulationScheduler({0: 1, 1: 3})],
)(Supervised)


@row("validation inside training by hand")
class ValidatedByHand(Supervised):
    """A forward pass of self.eval() under no_grad in on_train_batch_end (samples for a picture)."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.eval()
        with torch.no_grad():
            outputs = self(torch.ones(2, 5))
        self.train()
        self.seen.append(outputs.tolist())


@row("a block called in a hook")
class BlockInHook(Supervised):
    """self.backbone.blocks[0](x) under no_grad in on_train_epoch_end, and the head in on_train_batch_start."""

    def on_train_epoch_end(self) -> None:
        with torch.no_grad():
            self.seen.append(self.backbone.blocks[0](torch.ones(2, 7)).tolist())

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            self.seen.append(self.head(torch.ones(1, 7)).tolist())


@row("two forward passes, one loss")
class TwoPasses(Supervised):
    """Two calls of the backbone in one step (SimCLR, consistency)."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch) + nn.functional.mse_loss(self.backbone(batch[0]), self.backbone(batch[0] + 0.5))


@row("a loss of a detached branch")
class DetachedBranch(Supervised):
    """SimSiam: features.detach() on one side."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        first, second = self.backbone(batch[0]), self.backbone(batch[0] * 0.8)
        return nn.functional.mse_loss(first, second.detach()) + self.loss(batch)


@row("a loss with reduction='sum' over the global batch", names="")
class SumLoss(Supervised):
    """reduction="sum" divided by the batch size that the loader was given."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return nn.functional.mse_loss(self(batch[0]), batch[1], reduction="sum") / batch[0].shape[0]


@row("transfer_batch_to_device and on_after_batch_transfer")
class Transfer(Supervised):
    """Batches changed in on_after_batch_transfer and on_before_batch_transfer."""

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0] * 2, batch[1]]

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0] + 1, batch[1]]


@row("configure_model builds the network")
class Configured(Supervised):
    """Layers built in configure_model."""

    def __init__(self) -> None:
        super().__init__()
        del self.head

    def configure_model(self) -> None:
        if hasattr(self, "head"):
            return
        self.head = nn.Sequential(nn.Linear(7, 7), nn.Linear(7, 3))
