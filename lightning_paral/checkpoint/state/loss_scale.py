"""The loss scale in checkpoints, where Lightning saves it under the class name of the strategy's precision plugin."""

from collections.abc import Mapping
from typing import Any

_OF_DDP = "MixedPrecision"
_ALL = (_OF_DDP, "FSDPPrecision")


def add_loss_scale_of_ddp(checkpoint: dict[str, Any], plugin: str) -> None:
    """Save the loss scale also under the name that Lightning's DDP looks for.

    Args:
        checkpoint: a checkpoint that is about to be saved.
        plugin: the class name of the precision plugin that saves.
    """
    if _is_loss_scale(checkpoint.get(plugin)):
        checkpoint.setdefault(_OF_DDP, checkpoint[plugin])


def add_loss_scale_of_plugin(checkpoint: dict[str, Any], plugin: str) -> None:
    """Provide the loss scale under the name that the precision plugin with class name `plugin` looks for."""
    for name in _ALL:
        if _is_loss_scale(checkpoint.get(name)):
            checkpoint.setdefault(plugin, checkpoint[name])


def _is_loss_scale(state: Any) -> bool:
    """Return whether `state` is the state of a `torch.amp.GradScaler`."""
    return isinstance(state, Mapping) and {"scale", "_growth_tracker"} <= state.keys()
