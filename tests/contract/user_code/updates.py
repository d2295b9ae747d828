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


def copy_states(module: Any) -> None:
    """v.copy_(m * v + (1 - m) * w) over the values of two state_dicts, under no_grad"""
    with torch.no_grad():
        states = zip(module.target.state_dict().values(), module.backbone.state_dict().values(), strict=True)
        for q, p in states:
            q.copy_(DECAY * q + (1 - DECAY) * p)


def load(module: Any) -> None:
    """target.load_state_dict(online.state_dict())"""
    module.target.load_state_dict(module.backbone.state_dict())


@torch.no_grad()
def whole(module: Any) -> None:
    """q.copy_(values), load_state_dict(values), q.data = values, of new tensors"""
    for q in module.target.parameters():
        q.copy_(torch.arange(1.0, 1.0 + q.numel()).view(q.shape) / 10)
    module.target.load_state_dict({k: torch.full(v.shape, 0.1) for k, v in module.target.state_dict().items()})
    module.target.stem.bias.data = torch.arange(7.0) / 10


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
    "copied over state_dict": copy_states,
    "loaded": load,
    "set as a whole": whole,
}
THOROUGHLY = {
    "training_step": {"names": r"blocks\.0"},
    "on_train_batch_end": {"resumed": True, "strategies": ("paral_zero3_whole",)},
}
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


def add_refused(label: str, act: Any, place: str = "on_train_batch_end", **options: Any) -> None:
    options = {"names": r"stem\.weight"} | options
    add(f"target given {label}", f"`{act.__doc__}`, in {place}.", **acting(Momentum, place, act), **options)


def halve(module: Any) -> None:
    """q.data = q.data.half()"""
    module.target.stem.weight.data = module.target.stem.weight.data.half()


def reshape(module: Any) -> None:
    """q.data = a tensor of another shape"""
    module.target.stem.weight.data = torch.zeros(9, 4)


def share(module: Any) -> None:
    """q.data = p.data, which then share their memory"""
    module.target.stem.weight.data = module.backbone.stem.weight.data


DIVIDED = ("paral_fsdp", "paral_zero1", "paral_zero2", "paral_zero3", "paral_tp")
"""The strategies that say so. Under the others, torch fails at the next use."""
SHARDED = ("paral_fsdp", "paral_tp")
add_refused("another dtype", halve, only=DIVIDED)
add_refused("another shape", reshape, only=DIVIDED)
add_refused("the online network's data", share, "training_step", only=SHARDED)
add(
    "target multiplied in training_step, bf16-mixed",
    f"`{multiply_and_add.__doc__}` of a frozen copy, in training_step, with autocast.",
    **acting(Momentum, "training_step", multiply_and_add),
    trainer={"precision": "bf16-mixed"},
    tolerance=3e-2,
    names=r"target\.stem\.weight",
)
