"""The Trainer of a user's module, hooks that the user's code overrides, and models that generate on all ranks."""

import inspect
from collections.abc import Iterable
from contextlib import ExitStack
from functools import partial
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.nn import Module

from lightning_paral.compat.lightning.methods import shadow_method

_LIGHTNING = ("lightning", "pytorch_lightning")


def trainer_of(module: LightningModule | None) -> Trainer | None:
    """Return the Trainer that `module` is attached to, or `None` if there is none."""
    try:
        return None if module is None else module.trainer
    except RuntimeError:  # Lightning raises it if no Trainer is attached
        return None


def has_hook(module: LightningModule, hooks: Iterable[str]) -> bool:
    """Return whether `module` or a callback of its Trainer overrides one of `hooks`; ignore Lightning's callbacks."""
    callbacks = vars(module.trainer)["callbacks"]
    owners: list[tuple[object, type]] = [(module, LightningModule)]
    owners += [(each, Callback) for each in callbacks if type(each).__module__.partition(".")[0] not in _LIGHTNING]
    return any(is_overridden(hook, owner, base) for owner, base in owners for hook in hooks if hasattr(base, hook))


def generate_together(module: Module, undo: ExitStack) -> None:
    """Make `generate` of submodules go on until all ranks are done, until `undo` is closed.

    This is the option `synced_gpus` of transformers. Its default asks for marks that only transformers' own trainers
    set under ZeRO, and is `False` for some models, such as Whisper.
    """
    part: Any
    for part in module.modules():
        # Asked of the class: an adapter of PEFT forwards what it lacks to the model inside.
        generate = getattr(type(part), "generate", None)
        if callable(generate) and "synced_gpus" in inspect.signature(generate).parameters:
            shadow_method(part, "generate", partial(part.generate, synced_gpus=True), undo)
