"""Rows about loaders, schedulers and loops."""

from typing import Any

import torch
from torch import nn
from torch.optim import lr_scheduler

from tests.contract.user_code.models import Manual, Supervised, validated
from tests.contract.user_code.rows import add, row


def per_step(scheduler: Any, **more: Any) -> dict[str, Any]:
    return {"scheduler": scheduler, "interval": "step"} | more


SCHEDULERS: dict[str, Any] = {
    "StepLR per epoch": lambda o: lr_scheduler.StepLR(o, 1, 0.5),
    "OneCycleLR per step": lambda o: per_step(lr_scheduler.OneCycleLR(o, 0.1, total_steps=8)),
    "CosineAnnealingLR per 2 steps": lambda o: per_step(lr_scheduler.CosineAnnealingLR(o, 4), frequency=2),
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


@row("a loss of a detached branch")
class DetachedBranch(Supervised):
    """SimSiam: features.detach() on one side."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        first, second = self.backbone(batch[0]), self.backbone(batch[0] * 0.8)
        return nn.functional.mse_loss(first, second.detach()) + self.loss(batch)
