"""The values by which `ModelCheckpoint` chooses the best checkpoints and names files."""

from collections.abc import Callable
from types import MethodType
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_paral.compat.lightning.methods import shadow_method
from lightning_paral.compat.private_name import PrivateName

NAMES = (
    PrivateName(
        name="lightning.pytorch.callbacks.ModelCheckpoint._monitor_candidates",
        parameters=("self", "trainer"),
        purpose="to let all ranks choose the best checkpoint, and name files, by the same values",
        reason="the callback reads the values of its own rank, and has no public method that returns them",
        seen="lightning 2.6.1 to 2.6.6",
    ),
)


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
