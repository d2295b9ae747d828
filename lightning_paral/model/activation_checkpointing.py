"""A unit's activations are freed after its forward and computed anew in the backward pass."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import wraps
from typing import Any

import torch
from torch.nn import Module
from torch.utils.checkpoint import checkpoint

from lightning_paral.errors import ConfigurationError
from lightning_paral.model.offloaded_inputs import OffloadedInputs
from lightning_paral.model.units import Unit, choose_units
from lightning_paral.options import ActivationCheckpointing


def checkpoint_units(root: Module, options: ActivationCheckpointing) -> Callable[[], None]:
    """Let each unit of `root` keep its inputs only. Returns what undoes it.

    Names, classes and hooks stay as they are: the unit's `forward` is replaced on the instance.

    Args:
        root: the whole module.
        options: which units, and where their inputs are kept.

    Raises:
        ConfigurationError: there are no units to choose, or one lies inside another.
    """
    units = checkpointed_units(root, options)
    offloaded = OffloadedInputs() if options.offload_to_cpu else None
    for unit in units:
        _checkpoint(unit.module, offloaded)

    def undo() -> None:
        for unit in units:
            vars(unit.module).pop("forward", None)

    return undo


def checkpointed_units(root: Module, options: ActivationCheckpointing) -> Sequence[Unit]:
    """Return the units of `root` that `options` choose.

    Raises:
        ConfigurationError: there are none, or one lies inside another.
    """
    units = choose_units(root, options.units, options.min_params).inner
    if not units:
        raise ConfigurationError(
            f"activation_checkpointing finds no repeated blocks in {type(root).__name__}. Name the classes whose "
            "activations are to be computed anew: ActivationCheckpointing(units=['Block'])."
        )
    for unit in units:
        inside = [other.name for other in units if other is not unit and other.name.startswith(f"{unit.name}.")]
        if inside:
            raise ConfigurationError(
                f"activation_checkpointing takes in {unit.name!r} and {inside[0]!r} inside it, which would be computed "
                "three times. Choose one of the two."
            )
    return units


def _checkpoint(module: Module, offloaded: OffloadedInputs | None) -> None:
    forward = module.forward

    @wraps(forward)
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        # These hooks see only the unit's inputs; tensors saved inside are handled by the checkpoint's own hooks.
        with nullcontext() if offloaded is None else offloaded.of_call():
            return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    module.forward = recomputed
