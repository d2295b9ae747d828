"""Optimizers that do not amplify rounding errors, for comparisons between devices.

Devices add in different orders, so gradients differ by about 6e-8. If a gradient is nearly zero, Adam divides it by its
own size and takes a full step: weights of GPT-2, T5 and `OnTheModule` then differ by 5e-3. With SGD weights differ as
little as gradients do.
"""

from typing import Any, TypeVar

import torch
from torch.optim import SGD, Optimizer

Module = TypeVar("Module")


def with_sgd(module: type[Module]) -> type[Module]:
    """Return a subclass of `module` that trains with SGD in place of AdamW; groups, rates, schedulers are the same."""

    class WithSGD(module):  # type: ignore[misc, valid-type]
        def configure_optimizers(self) -> Any:
            return _without_adam(super().configure_optimizers())

    WithSGD.__name__ = WithSGD.__qualname__ = module.__name__
    return WithSGD


def _without_adam(configured: Any) -> Any:
    if isinstance(configured, Optimizer):
        return _sgd(configured)
    if isinstance(configured, tuple):
        return tuple(map(_without_adam, configured))
    optimizer = _sgd(configured["optimizer"])
    scheduler = configured["lr_scheduler"]["scheduler"]
    anew = torch.optim.lr_scheduler.LambdaLR(optimizer, scheduler.lr_lambdas)
    return {"optimizer": optimizer, "lr_scheduler": configured["lr_scheduler"] | {"scheduler": anew}}


def _sgd(optimizer: Optimizer) -> SGD:
    kept = ("params", "initial_lr", "weight_decay")
    groups = [{name: group[name] for name in kept if name in group} for group in optimizer.param_groups]
    for group, old in zip(groups, optimizer.param_groups, strict=True):
        group["lr"] = group.pop("initial_lr", old["lr"])
    return SGD(groups, lr=1e-2, momentum=0.9)
