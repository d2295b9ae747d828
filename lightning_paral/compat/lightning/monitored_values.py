"""The values by which `ModelCheckpoint` chooses the best checkpoints and names files."""

from collections.abc import Callable
from types import MethodType
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_paral.compat.lightning.methods import shadow_method
from lightning_paral.compat.private_name import Names

NAMES: Names = {
    "lightning.pytorch.callbacks.ModelCheckpoint": {
        "_monitor_candidates(trainer)": "let all ranks choose the best checkpoint by the same values",
    },
}


def change_monitored(callback: ModelCheckpoint, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Let `callback` use what `change` returns for its values, until `restore_monitored`."""
    shadow_method(callback, "_monitor_candidates", _ChangedValues(callback, change))


def restore_monitored(callback: ModelCheckpoint) -> None:
    """Undo `change_monitored`."""
    vars(callback).pop("_monitor_candidates", None)


class _ChangedValues:
    """Replaces the method `_monitor_candidates` of one callback. A copy of it has the method of its class."""

    def __init__(self, callback: ModelCheckpoint, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        self._callback = callback
        self._change = change

    def __call__(self, trainer: Trainer) -> dict[str, Any]:
        return self._change(type(self._callback)._monitor_candidates(self._callback, trainer))

    def __reduce__(self) -> tuple[Any, ...]:
        return MethodType, (type(self._callback)._monitor_candidates, self._callback)
