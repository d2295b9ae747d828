"""Rows about updating a frozen target network by hand: BYOL, MoCo, DINO, DQN, SAC, EMA of a diffusion model."""

from typing import Any

import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.contract.user_code.models import Momentum, validated
from tests.contract.user_code.places import PLACES, acting
from tests.contract.user_code.rows import add, row

DECAY = 0.5


def assign(module: Any) -> None:
    """q.data = m * q.data + (1 - m) * p.data"""
    for q, p in zip(module.target.parameters(), module.backbone.parameters(), strict=True):
        q.data = DECAY * q.data + (1 - DECAY) * p.data


def multiply_and_add(module: Any) -> None:
    """q.data.mul_(m).add_((1 - m) * p.detach().data)"""
    for q, p in zip(module.target.parameters(), module.backbone.parameters(), strict=True):
        q.data.mul_(DECAY).add_((1 - DECAY) * p.detach().data)


def lerp(module: Any) -> None:
    """q.lerp_(p, 1 - m) under no_grad"""
    with torch.no_grad():
        for q, p in zip(module.target.parameters(), module.backbone.parameters(), strict=True):
            q.lerp_(p, 1 - DECAY)


def copy_data(module: Any) -> None:
    """q.data.copy_((1 - m) * p.data + m * q.data)"""
    for q, p in zip(module.target.parameters(), module.backbone.parameters(), strict=True):
        q.data.copy_((1 - DECAY) * p.data + DECAY * q.data)


def copy_states(module: Any) -> None:
    """v.copy_(m * v + (1 - m) * w) over the values of two state_dicts, under no_grad"""
    with torch.no_grad():
        states = zip(module.target.state_dict().values(), module.backbone.state_dict().values(), strict=True)
        for q, p in states:
            q.copy_(DECAY * q + (1 - DECAY) * p)


def load(module: Any) -> None:
    """target.load_state_dict(online.state_dict())"""
    module.target.load_state_dict(module.backbone.state_dict())


def in_turns(module: Any) -> None:
    """each parameter in another way: assigned, multiplied, lerped, copied"""
    ways = (
        lambda q, p: setattr(q, "data", DECAY * q.data + (1 - DECAY) * p.data),
        lambda q, p: q.data.mul_(DECAY).add_(p.detach().data, alpha=1 - DECAY),
        lambda q, p: q.detach().lerp_(p.detach(), 1 - DECAY),
        lambda q, p: q.data.copy_(DECAY * q.data + (1 - DECAY) * p.data),
    )
    for number, (q, p) in enumerate(zip(module.target.parameters(), module.backbone.parameters(), strict=True)):
        ways[number % len(ways)](q, p)


KINDS = {
    "assigned": assign,
    "multiplied": multiply_and_add,
    "lerped": lerp,
    "copied": copy_data,
    "copied over state_dict": copy_states,
    "loaded": load,
}
THOROUGHLY = {"training_step": {}, "on_train_batch_end": {"resumed": True, "strategies": ("paral_zero3_whole",)}}
"""The place where every kind of update is tried by itself."""

for place in PLACES:
    for label, act in (KINDS if place in THOROUGHLY else {"in turns": in_turns}).items():
        options = acting(Momentum, place, act) | THOROUGHLY.get(place, {})
        add(f"target {label} in {place}", f"`{act.__doc__}` of a frozen copy, in {place}.", **options)


class ByAdam(Momentum):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)


OFFLOADED = ("paral_zero3_whole", "paral_fsdp_offload", "paral_zero2_offload", "paral_zero3_offload")
add(
    "target in turns by AdamW",
    f"`{in_turns.__doc__}` of a frozen copy, in on_train_batch_end, beside AdamW.",
    **acting(ByAdam, "on_train_batch_end", in_turns),
    strategies=OFFLOADED,
)


@row("target AveragedModel by hand", resumed=True, strategies=("paral_zero3_whole",), names="averaged")
class Averaged(Momentum):
    """torch.optim.swa_utils.AveragedModel held by the module, update_parameters in on_train_batch_end."""

    def __init__(self) -> None:
        super().__init__()
        self.averaged = AveragedModel(self.backbone, multi_avg_fn=get_ema_multi_avg_fn(DECAY))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([*self.backbone.parameters(), *self.head.parameters()], lr=0.05, momentum=0.9)

    def on_train_batch_end(self, *args: Any) -> None:
        self.averaged.update_parameters(self.backbone)


@row("target EMA kept as tensors")
class Shadow(Momentum):
    """An EMA kept as plain tensors in a dict, swapped in for validation and back (timm, lucidrains)."""

    def on_train_start(self) -> None:
        self.shadow = {name: p.detach().clone() for name, p in self.backbone.named_parameters()}

    def on_train_batch_end(self, *args: Any) -> None:
        for name, p in self.backbone.named_parameters():
            self.shadow[name].mul_(DECAY).add_(p.detach(), alpha=1 - DECAY)

    def on_train_epoch_end(self) -> None:
        for name, p in self.backbone.named_parameters():
            p.data.copy_(self.shadow[name])


@row("target swap for validation", loaders=validated)
class Swapped(Momentum):
    """p.data and q.data exchanged in on_validation_start and back in on_validation_end (diffusion's EMA scope)."""

    def _swap(self) -> None:
        for q, p in zip(self.target.parameters(), self.backbone.parameters(), strict=True):
            q.data, p.data = p.data.clone(), q.data.clone()

    def on_validation_start(self) -> None:
        self._swap()

    def on_validation_end(self) -> None:
        self._swap()

    def on_train_batch_end(self, *args: Any) -> None:
        lerp(self)


@row("target one step in two by state_dict")
class HardUpdate(Momentum):
    """target.load_state_dict(online.state_dict()) every second step in training_step (DQN)."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        if self.global_step % 2 == 1:
            load(self)
        return loss
