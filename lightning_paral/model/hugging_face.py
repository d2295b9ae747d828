"""What models of Hugging Face's transformers need: ranks that generate together, and `from_pretrained` left alone."""

import inspect
import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from typing import Any

import torch
from torch.nn import Module, Parameter

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


def is_loading_pretrained() -> bool:
    """Return whether `PreTrainedModel.from_pretrained` is on the call stack.

    It searches the stack because a patch would come too late for a `configure_model` that imports transformers itself,
    and because runs that do not use transformers should not import it.
    """
    if "transformers.modeling_utils" not in sys.modules:
        return False
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "from_pretrained" and frame.f_globals["__name__"] == "transformers.modeling_utils":
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def is_placeholder(device: torch.device) -> bool:
    """Return whether a tensor created on `device` now is a placeholder that `from_pretrained` will replace."""
    return device.type == "meta" and is_loading_pretrained()


def is_pretrained(parameter: Parameter) -> bool:
    """Return whether `from_pretrained` has read `parameter` from a file."""
    return bool(getattr(parameter, "_is_hf_initialized", False))
