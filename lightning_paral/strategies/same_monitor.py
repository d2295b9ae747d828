"""Let all ranks choose the best checkpoint by the values of rank 0, which may be logged without `sync_dist`."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from lightning_paral.compat.lightning.monitored_values import change_monitored, restore_monitored

Broadcast = Callable[[Any], Any]


def share_monitored(callbacks: Iterable[Callback], broadcast: Broadcast, device: torch.device) -> None:
    """Let those `callbacks` that monitor a value use the values of rank 0.

    When such a callback considers a checkpoint, it calls `broadcast` once, which is collective.

    Args:
        callbacks: the callbacks. Only `ModelCheckpoint` and its subclasses change.
        broadcast: returns the object that rank 0 passes.
        device: where the values of rank 0 are needed.
    """
    for callback in callbacks:
        if isinstance(callback, ModelCheckpoint) and _uses_values(callback):
            change_monitored(callback, partial(_values_of_rank_0, broadcast=broadcast, device=device))


def restore_monitors(callbacks: Iterable[Callback]) -> None:
    """Undo `share_monitored`."""
    for callback in callbacks:
        if isinstance(callback, ModelCheckpoint):
            restore_monitored(callback)


def _uses_values(callback: ModelCheckpoint) -> bool:
    """Return whether the checkpoints of `callback`, or the names of their files, depend on logged values."""
    return callback.monitor is not None or "{" in f"{callback.filename}{callback.CHECKPOINT_NAME_LAST}"


def _values_of_rank_0(values: dict[str, Any], broadcast: Broadcast, device: torch.device) -> dict[str, Any]:
    on_cpu = {name: value.cpu() if isinstance(value, Tensor) else value for name, value in values.items()}
    shared = broadcast(on_cpu)
    devices = {name: value.device for name, value in values.items() if isinstance(value, Tensor)}
    return {
        name: value.to(devices.get(name, device)) if isinstance(value, Tensor) else value
        for name, value in shared.items()
    }
