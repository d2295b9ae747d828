"""Rows about writing to trained parameters: WGAN's clamp, max-norm, reinitialized layers, lottery tickets."""

from typing import Any

import torch
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from tests.contract.user_code.models import Supervised
from tests.contract.user_code.places import PLACES, acting
from tests.contract.user_code.rows import add, row


def clamp(module: Any) -> None:
    """p.data.clamp_(-0.3, 0.3) for all parameters (WGAN)"""
    for p in module.parameters():
        p.data.clamp_(-0.3, 0.3)


def max_norm(module: Any) -> None:
    """p.div_(p.norm(dim=1, keepdim=True).clamp(min=0.8)) for weights, under no_grad (max-norm)"""
    with torch.no_grad():
        for block in module.backbone.blocks:
            block.layer.weight.div_(block.layer.weight.norm(dim=1, keepdim=True).clamp(min=0.8))
        module.head.weight.div_(module.head.weight.norm(dim=1, keepdim=True).clamp(min=0.8))


def reset_layer(module: Any) -> None:
    """nn.init.constant_(layer.weight) and zero of a row (dead neurons drawn anew)"""
    nn.init.constant_(module.head.weight, 0.1)
    with torch.no_grad():
        module.backbone.blocks[0].layer.weight[2].zero_()


def vector(module: Any) -> None:
    """vector_to_parameters(parameters_to_vector(...) * 0.9, ...)"""
    with torch.no_grad():
        values = parameters_to_vector(module.parameters())
        vector_to_parameters(values * 0.9, module.parameters())


def rewind(module: Any) -> None:
    """load_state_dict of a copy kept at the start (lottery ticket, Reptile, SAM's restore)"""
    if not hasattr(module, "kept"):
        module.kept = {k: v.detach().clone() for k, v in module.state_dict().items()}
    elif module.trainer.global_step == 2:
        module.load_state_dict(module.kept)


ACTS = {
    "clamped": clamp,
    "divided by norms": max_norm,
    "reset in a layer": reset_layer,
    "set from a vector": vector,
    "rewound": rewind,
}
THOROUGHLY = {
    "on_before_optimizer_step": {},
    "on_train_batch_end": {"resumed": True, "strategies": ("paral_zero3_whole", "paral_fsdp_offload")},
}
"""The place where every kind of write is tried. One kind is tried in the other places."""

for place in PLACES:
    for label, act in (ACTS if place in THOROUGHLY else {"clamped": clamp}).items():
        options = acting(Supervised, place, act) | THOROUGHLY.get(place, {})
        add(f"trained {label} in {place}", f"`{act.__doc__}`, in {place}.", **options)


class ByAdam(Supervised):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


add(
    "trained clamped by AdamW",
    f"`{clamp.__doc__}`, in on_train_batch_end, beside AdamW.",
    **acting(ByAdam, "on_train_batch_end", clamp),
    strategies=("paral_zero3_whole", "paral_fsdp_offload", "paral_zero2_offload", "paral_zero3_offload"),
)


@row("trained set before the fit", names=r"\.eye\.")
class SetInFitStart(Supervised):
    """nn.init.orthogonal_ and p.data = ... in on_fit_start and configure_optimizers."""

    def on_fit_start(self) -> None:
        nn.init.eye_(self.backbone.blocks[1].layer.weight)

    def configure_optimizers(self) -> Any:
        self.head.weight.data = self.head.weight.data * 0.5
        return super().configure_optimizers()
