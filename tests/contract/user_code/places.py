"""The places where user code acts: the step, hooks of the module, and hooks of a callback."""

from collections.abc import Callable
from typing import Any

from lightning.pytorch import Callback, LightningModule

from tests.contract.user_code.models import regression, validated

PLACES = (
    "training_step",
    "on_fit_start",
    "on_train_start",
    "on_train_epoch_start",
    "on_train_batch_start",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "optimizer_step",
    "on_before_zero_grad",
    "on_train_batch_end",
    "on_train_epoch_end",
    "validation_step",
    "on_validation_end",
    "callback.on_train_batch_start",
    "callback.on_before_zero_grad",
    "callback.on_train_batch_end",
    "callback.on_train_epoch_end",
)


def module_acting(base: type[LightningModule], place: str, act: Callable[[Any], None]) -> type[LightningModule]:
    """Return a subclass of `base` that acts in the hook `place` after `base`, or in the step before it."""

    def hook(self: Any, *args: Any, **kwargs: Any) -> Any:
        if place == "training_step":
            act(self)
        result = getattr(base, place)(self, *args, **kwargs)
        if place != "training_step":
            act(self)
        return result

    return type("Acting", (base,), {place: hook})


def callback_acting(place: str, act: Callable[[Any], None]) -> Callback:
    """Return a callback that acts in the hook `place`."""

    def hook(self: Any, trainer: Any, module: LightningModule, *args: Any, **kwargs: Any) -> None:
        act(module)

    return type("Acting", (Callback,), {place: hook})()


def acting(base: type[LightningModule], place: str, act: Callable[[Any], None]) -> dict[str, Any]:
    """Return the options of a row in which `act` is called at a place."""
    loaders = validated if "validation" in place else regression
    if place.startswith("callback."):
        name = place.removeprefix("callback.")
        return {"module": base, "callbacks": lambda: [callback_acting(name, act)], "loaders": loaders}
    return {"module": module_acting(base, place, act), "loaders": loaders}
