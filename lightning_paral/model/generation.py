"""Keep ranks together while models of transformers generate text: each forward pass is collective."""

import inspect
from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from typing import Any

from torch.nn import Module

from lightning_paral.compat.lightning.methods import shadow_method


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
            shadow_method(part, "generate", _together(part.generate), undo)


def _together(generate: Callable[..., Any]) -> Callable[..., Any]:
    # A function of this package, unlike a `partial`, is left out if the module is saved in a checkpoint.
    @wraps(generate)
    def generate_together(*args: Any, **kwargs: Any) -> Any:
        return generate(*args, **({"synced_gpus": True} | kwargs))

    return generate_together
