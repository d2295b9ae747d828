"""Hand-written training loops, without Lightning or this package, which every strategy must equal.

Where a check compares devices, models train with SGD. Devices add in different orders, so gradients differ by about
6e-8. If a gradient is nearly zero, Adam divides it by its own size and takes a full step: weights of GPT-2, T5 and
`OnTheModule` then differ by 5e-3. With SGD weights differ as little as gradients do.
"""

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.utils.data import DataLoader

from tests.gpu.place import num_ranks
from tests.models.regression import GLOBAL_BATCH_SIZE, Regression, regression_data
from tests.models.tokens import Fitted, token_loader

Fit = tuple[list[float], dict[str, Tensor]]
"""The loss of each batch, and the final weights on the host."""
Module = TypeVar("Module")
_DTYPES = {"16": torch.float16, "bf16": torch.bfloat16, "64": torch.float64, "32": torch.float32}


def regression(
    num_steps: int,
    accumulate: int,
    device: str,
    *,
    make: Callable[[], Regression] = Regression,
    precision: str = "32-true",
    clip: tuple[str, float] = ("norm", 0.1),
) -> Fit:
    """Train as `tests.models.regression.fit_regression` does; the last step may have a partial window."""
    torch.manual_seed(3)
    model = make()
    num_batches = num_steps * accumulate - (1 if accumulate > 1 else 0)
    # Full batches, also on a rank that would draw only its share.
    whole = DataLoader(regression_data(num_batches, num_ranks()).dataset, GLOBAL_BATCH_SIZE)
    return _loop(model, whole, device, accumulate=accumulate, precision=precision, clip=clip)


def tokens(make: Callable[[], Fitted], num_batches: int, device: str) -> Fit:
    """Train as `tests.models.tokens.fit` does, for a module with automatic optimization."""
    torch.manual_seed(5)
    return _loop(make(), token_loader(num_batches, 1), device)


def _loop(
    model: Any,
    batches: Iterable[list[Tensor]],
    device: str,
    *,
    accumulate: int = 1,
    precision: str = "32-true",
    clip: tuple[str, float] | None = None,
) -> Fit:
    dtype = _DTYPES[precision.split("-")[0]]
    mixed = precision.endswith("-mixed")
    model.to(device=device, dtype=None if mixed else dtype)
    configured = model.configure_optimizers()
    optimizer, scheduler = configured, None
    if isinstance(configured, dict):
        optimizer, scheduler = configured["optimizer"], configured["lr_scheduler"]["scheduler"]
    scaler = torch.amp.GradScaler(device, enabled=precision == "16-mixed")
    batches = list(batches)
    for number, batch in enumerate(batches):
        moved = [
            part.to(device=device, dtype=dtype if part.is_floating_point() and not mixed else None) for part in batch
        ]
        with torch.autocast(device, dtype) if mixed else nullcontext():
            loss = model.training_step(moved, number)
        scaler.scale(loss / accumulate).backward()
        if (number + 1) % accumulate and number + 1 < len(batches):
            continue
        scaler.unscale_(optimizer)
        if clip is not None:
            function = nn.utils.clip_grad_norm_ if clip[0] == "norm" else nn.utils.clip_grad_value_
            function(list(model.parameters()), clip[1])
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()
    return model.losses, {name: weight.detach().cpu().clone() for name, weight in model.state_dict().items()}


def with_sgd(module: type[Module]) -> type[Module]:
    """Return a subclass of `module` that trains with SGD in place of AdamW; groups, rates, schedulers are the same."""

    class WithSGD(module):  # type: ignore[misc, valid-type]
        def configure_optimizers(self) -> Any:
            return _without_adam(super().configure_optimizers())

    WithSGD.__name__ = WithSGD.__qualname__ = module.__name__
    return WithSGD


def _without_adam(configured: Any) -> Any:
    if isinstance(configured, tuple):
        return tuple(map(_without_adam, configured))
    if isinstance(configured, dict):
        optimizer, entry = _without_adam(configured["optimizer"]), configured["lr_scheduler"]
        anew = torch.optim.lr_scheduler.LambdaLR(optimizer, entry["scheduler"].lr_lambdas)
        return {"optimizer": optimizer, "lr_scheduler": entry | {"scheduler": anew}}
    assert isinstance(configured, Optimizer)
    kept = ("params", "weight_decay")
    groups = [{name: group[name] for name in kept if name in group} for group in configured.param_groups]
    for group, old in zip(groups, configured.param_groups, strict=True):
        group["lr"] = old.get("initial_lr", old["lr"])
    return SGD(groups, lr=1e-2, momentum=0.9)
