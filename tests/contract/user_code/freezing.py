"""Rows about freezing and unfreezing parameters before and during a run."""

from typing import Any

import torch
from lightning.pytorch.callbacks import BackboneFinetuning
from torch import nn

from tests.contract.user_code.models import Supervised
from tests.contract.user_code.rows import row

LONGER = {"max_epochs": 3}


@row("freezing before the fit")
class FrozenBackbone(Supervised):
    """requires_grad_(False) of the backbone in __init__; the optimizer gets the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone.requires_grad_(False)


@row("freezing in on_fit_start", names="got no gradient")
class FrozenInHook(Supervised):
    """requires_grad_(False) of a block in on_fit_start; the optimizer has all parameters."""

    def on_fit_start(self) -> None:
        self.backbone.blocks[0].requires_grad_(False)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


@row("unfreezing by hand, optimizer has all", trainer=LONGER, names="backbone.stem")
class Unfrozen(Supervised):
    """A frozen backbone whose parameters the optimizer has; requires_grad_(True) in on_train_epoch_start."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone.requires_grad_(False)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.backbone.requires_grad_(True)


@row("unfreezing a block at a time, in the step", trainer=LONGER, names="unfroze|requires_grad|blocks.1")
class UnfrozenInStep(Unfrozen):
    """requires_grad_(True) of a block in training_step."""

    def on_train_epoch_start(self) -> None:
        pass

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.global_step == 2:
            self.backbone.blocks[1].requires_grad_(True)
        return super().training_step(batch, batch_idx)


@row("freezing during the run", trainer=LONGER, names="got no gradient")
class FrozenLater(Supervised):
    """requires_grad_(False) of the backbone in on_train_epoch_start of the second epoch."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.backbone.requires_grad_(False)


@row("freezing and unfreezing in turns", trainer=LONGER, names="got no gradient")
class InTurns(Supervised):
    """requires_grad_ of backbone and head in turns, in on_train_batch_start."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.backbone.requires_grad_(batch_idx % 2 == 0)
        self.head.requires_grad_(batch_idx % 2 == 1)


@row("unfreezing, optimizer.add_param_group", trainer=LONGER, names="backbone.stem")
class AddedGroup(Unfrozen):
    """optimizer.add_param_group of the backbone as it is unfrozen."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.head.parameters(), lr=0.05, momentum=0.9)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.backbone.requires_grad_(True)
            self.trainer.optimizers[0].add_param_group({"params": list(self.backbone.parameters()), "lr": 0.02})


row(
    "unfreezing by BackboneFinetuning",
    sentence="BackboneFinetuning(unfreeze_backbone_at_epoch=1), a BaseFinetuning.",
    callbacks=lambda: [BackboneFinetuning(1, lambda epoch: 1.5, verbose=False)],
    trainer=LONGER,
    strategies=("paral_fsdp_offload",),
    names="Finetuning",
)(Supervised)


row(
    "unfreezing by BackboneFinetuning, resumed",
    sentence="BackboneFinetuning over a resume.",
    callbacks=lambda: [BackboneFinetuning(1, lambda epoch: 1.5, verbose=False)],
    resumed=True,
    names="Finetuning",
)(Supervised)


@row("parameters unused in the loss", names="spare")
class Unused(Supervised):
    """A layer that the loss does not use, trained by the optimizer, with weight decay."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(3, 3)


@row("parameters used in some steps", names="spare")
class SometimesUsed(Supervised):
    """A layer that every second step uses."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(3, 3)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        inputs, targets = batch
        outputs = self(inputs)
        if batch_idx % 2:
            outputs = self.spare(outputs)
        return nn.functional.mse_loss(outputs, targets)


row(
    "parameters used in some steps, accumulating",
    sentence="A layer that every second batch uses, with accumulate_grad_batches=2.",
    trainer={"accumulate_grad_batches": 2},
    names="got no gradient",
)(SometimesUsed)


class UsedIn(SometimesUsed):
    """The spare layer is used in the batches of `used`, and decays by weight."""

    used: tuple[int, ...]
    optimizer: Any = torch.optim.SGD

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        inputs, targets = batch
        outputs = self(inputs)
        if batch_idx in self.used:
            outputs = outputs + self.spare(outputs)
        return nn.functional.mse_loss(outputs, targets)

    def configure_optimizers(self) -> Any:
        return self.optimizer(self.parameters(), lr=1e-2, weight_decay=0.5)


@row("parameters used in early steps, by AdamW", names="spare", apart=(r"optimizer_states: 0: state: \d+: step",))
class UsedEarly(UsedIn):
    """A layer that only the first two batches use, by AdamW with weight decay."""

    used = (0, 1)
    optimizer = torch.optim.AdamW


@row("a layer added in on_fit_start")
class AddedLayer(Supervised):
    """self.head = nn.Linear(...) in setup() (a new head for a pretrained backbone)."""

    def setup(self, stage: str) -> None:
        self.head = nn.Linear(7, 3)


@row("a layer replaced during the run", trainer={"max_epochs": 2}, names=r"head|optimizer\.state")
class ReplacedLayer(Supervised):
    """self.head.weight = nn.Parameter(...) in on_train_epoch_start, with the optimizer's param_groups."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            old = self.head.weight
            self.head.weight = nn.Parameter(torch.full_like(old, 0.1))
            optimizer = self.trainer.optimizers[0]
            optimizer.state.pop(old, None)
            for group in optimizer.param_groups:
                group["params"] = [self.head.weight if p is old else p for p in group["params"]]
