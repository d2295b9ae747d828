"""The check in `GradientAccumulationScheduler` that rejects every `DeepSpeedStrategy`."""

from collections.abc import Callable
from functools import partial
from typing import Any

from lightning.pytorch.callbacks import GradientAccumulationScheduler

from lightning_paral.compat.lightning.methods import shadow_method
from lightning_paral.compat.private_name import Names, named

NAMES: Names = {
    "lightning.pytorch.callbacks.GradientAccumulationScheduler": {
        "on_train_start(trainer, pl_module)": "let GradientAccumulationScheduler work under ZeRO",
    },
}


def replace_check(callback: GradientAccumulationScheduler, check: Callable[..., None]) -> None:
    """Replace the callback's own check with `check(callback, trainer, module)`."""
    named(NAMES, "on_train_start").resolve()
    replacement: Any = partial(check, callback)
    shadow_method(callback, "on_train_start", replacement)
