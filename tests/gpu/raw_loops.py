"""Hand-written training loops, without Lightning or this package, which every strategy must equal."""

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.models.regression import GLOBAL_BATCH_SIZE, Regression, regression_data
from tests.models.tokens import Fitted, token_loader

Fit = tuple[list[float], dict[str, Tensor]]
"""The loss of each batch, and the final weights on the host."""

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
    whole = DataLoader(regression_data(num_batches, _num_ranks()).dataset, GLOBAL_BATCH_SIZE)
    return loop(model, whole, device, accumulate=accumulate, precision=precision, clip=clip)


def _num_ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def tokens(make: Callable[[], Fitted], num_batches: int, device: str) -> Fit:
    """Train as `tests.models.tokens.fit` does, for a module with automatic optimization."""
    torch.manual_seed(5)
    return loop(make(), token_loader(num_batches, 1), device)


def loop(
    model: Any,
    batches: Iterable[list[Tensor]],
    device: str,
    *,
    accumulate: int = 1,
    precision: str = "32-true",
    clip: tuple[str, float] | None = None,
) -> Fit:
    """Train `model`, which records its losses, with its own optimizer."""
    dtype = _DTYPES[precision.split("-")[0]]
    mixed = precision.endswith("-mixed")
    model.to(device=device, dtype=None if mixed else dtype)
    configured = model.configure_optimizers()
    optimizer = configured["optimizer"] if isinstance(configured, dict) else configured
    scheduler = configured["lr_scheduler"]["scheduler"] if isinstance(configured, dict) else None
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
        clip_gradients(model.parameters(), clip)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()
    return model.losses, {name: weight.detach().cpu().clone() for name, weight in model.state_dict().items()}


def clip_gradients(parameters: Iterable[nn.Parameter], clip: tuple[str, float] | None) -> None:
    """Clip by `("norm", most)` or `("value", most)`."""
    if clip is None:
        return
    function = nn.utils.clip_grad_norm_ if clip[0] == "norm" else nn.utils.clip_grad_value_
    function(list(parameters), clip[1])
