"""The check in `GradientAccumulationScheduler` that rejects every `DeepSpeedStrategy`."""

from collections.abc import Callable
from functools import partial
from typing import Any

from lightning.pytorch.callbacks import GradientAccumulationScheduler

from lightning_paral.compat.lightning.methods import shadow_method
from lightning_paral.compat.private_name import PrivateName

_CHECK = PrivateName(
    name="lightning.pytorch.callbacks.GradientAccumulationScheduler.on_train_start",
    parameters=("self", "trainer", "pl_module"),
    purpose="to let GradientAccumulationScheduler work under ZeRO, where Lightning accumulates gradients",
    reason="the callback rejects every DeepSpeedStrategy, and has no option that turns the check off",
    seen="lightning 2.6.1 to 2.6.6",
)
NAMES = (_CHECK,)


def replace_check(callback: GradientAccumulationScheduler, check: Callable[..., None]) -> None:
    """Replace the callback's own check with `check(callback, trainer, module)`."""
    _CHECK.resolve()
    replacement: Any = partial(check, callback)
    shadow_method(callback, "on_train_start", replacement)
