"""Let `check` look at the parameters after each hook of a step, and say where the hook is written."""

import inspect
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

_HOOKS = (
    *("on_train_batch_start", "on_before_zero_grad", "on_before_backward", "on_after_backward"),
    *("on_before_optimizer_step", "configure_gradient_clipping", "optimizer_step", "optimizer_zero_grad"),
    *("on_train_batch_end", "lr_scheduler_step"),
)


def watch_hooks(recorder: Callback, trainer: Trainer, module: LightningModule, record: Callable[[str], None]) -> None:
    """Call `record` after each hook of a step that a callback or the module overrides, with the name of its place."""
    callbacks: list[Callback] = vars(trainer)["callbacks"]
    owners: list[tuple[Any, type]] = [(each, Callback) for each in callbacks if each is not recorder]
    for owner, base in [*owners, (module, LightningModule)]:
        for name in _HOOKS:
            method = getattr(type(owner), name, None)
            if method is not None and method is not getattr(base, name, None):
                setattr(
                    owner, name, _recorded(getattr(owner, name), f"{name} of {_place(type(owner), method)}", record)
                )


def _recorded(hook: Callable[..., Any], place: str, record: Callable[[str], None]) -> Callable[..., Any]:
    @wraps(hook)
    def call(*args: Any, **kwargs: Any) -> Any:
        result = hook(*args, **kwargs)
        record(place)
        return result

    return call


def _place(owner: type, method: Any) -> str:
    function = inspect.unwrap(method)
    return f"{owner.__name__} ({Path(function.__code__.co_filename).name}:{function.__code__.co_firstlineno})"
