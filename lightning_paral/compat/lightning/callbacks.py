"""Callbacks of Lightning: averages of weights, and the values by which checkpoints are chosen."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_paral.compat.lightning.methods import shadow_method
from lightning_paral.compat.lightning.strategies import set_device
from lightning_paral.compat.private_name import Names, replace

NAMES: Names = {
    "lightning.pytorch.callbacks.WeightAveraging": {
        "._average_model": "average shards instead of a full copy of the module",
        "_swap_models(pl_module); _copy_average_to_current(pl_module)": "exchange averages and weights shard by shard",
    },
    "lightning.pytorch.callbacks.StochasticWeightAveraging": {
        "._average_model": "average shards instead of a full copy of the module",
    },
    "lightning.pytorch.callbacks.ModelCheckpoint": {
        "_monitor_candidates(trainer)": "let all ranks choose the best checkpoint by the same values",
    },
}


# Private state and methods of Lightning's weight-averaging callbacks

SWAP, COPY = "_swap_models", "_copy_average_to_current"
"""Names of methods of `WeightAveraging`: one swaps averages and weights, one copies the averages to the weights."""


def averages_of(callback: Any) -> Any:
    """Return the copy of the module in which `callback` keeps its averages, or the object set in its place."""
    return callback._average_model


def set_averages(callback: Any, averages: Any) -> None:
    """Make `callback` keep its averages in `averages`."""
    replace(callback, "_average_model", averages)


def options_of(callback: Any, trainer: Trainer, setup: Callable[..., None]) -> dict[str, Any]:
    """Return the options with which `setup`, the method of `WeightAveraging`, creates an `AveragedModel`."""
    probe = LightningModule()
    set_device(probe, torch.device("meta"))  # on which the averages are unless the user chose a device
    setup(callback, trainer, probe, "fit")
    made = averages_of(callback)
    options = {name: getattr(made, name) for name in ("use_buffers", "avg_fn", "multi_avg_fn")}
    return options | {"device": None if made.n_averaged.is_meta else made.n_averaged.device}


# The values by which `ModelCheckpoint` chooses the best checkpoints and names files


def change_monitored(
    callback: ModelCheckpoint, change: Callable[[dict[str, Any]], dict[str, Any]], undo: ExitStack
) -> None:
    """Let `callback` use what `change` returns for its values, until `undo` is closed."""
    monitored = callback._monitor_candidates
    shadow_method(callback, "_monitor_candidates", lambda trainer: change(monitored(trainer)), undo)
