"""The hooks and gradient clipping that a precision plugin of Lightning runs between an optimizer's closure and step."""

from collections.abc import Callable
from contextlib import ExitStack
from types import MethodType
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.plugins import Precision

from lightning_paral.compat.lightning.methods import shadow_method
from lightning_paral.compat.private_name import Names

NAMES: Names = {
    "lightning.pytorch.plugins.Precision": {
        "_after_closure(model, optimizer)": "run hooks and clipping before the step of a sharded optimizer",
    },
}


def after_closure(plugin: Precision, module: LightningModule, optimizer: Any) -> None:
    """Run the `on_before_optimizer_step` hooks, and clip gradients as configured in the Trainer."""
    plugin._after_closure(module, optimizer)


def call_after_closure(plugin: Precision, then: Callable[[], None], undo: ExitStack) -> None:
    """Call `then` whenever the hooks and clipping are done and an optimizer begins to change weights."""
    shadow_method(plugin, "_after_closure", _AfterClosure(plugin, then), undo)


class _AfterClosure:
    """Replaces the method `_after_closure` of one plugin. A copy of the plugin has the method of its class."""

    def __init__(self, plugin: Precision, then: Callable[[], None]) -> None:
        self._plugin = plugin
        self._then = then

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        type(self._plugin)._after_closure(self._plugin, *args, **kwargs)
        self._then()

    def __reduce__(self) -> tuple[Any, ...]:
        return MethodType, (type(self._plugin)._after_closure, self._plugin)
