"""Recognize `from_pretrained` of transformers in `configure_model`, so that it is left alone.

It builds the model on the meta device, inserts tensors from mapped files, and draws what the files lack. It gives the
same values as in one process only if nothing is drawn, copied or sharded in between.
"""

import sys

import torch
from torch.nn import Parameter


def is_loading_pretrained() -> bool:
    """Return whether `PreTrainedModel.from_pretrained` is on the call stack.

    Searches the stack because a patch would come too late for a `configure_model` that imports transformers itself, and
    because transformers is not to be imported for others.
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
    """Return whether a new tensor on `device` is only a placeholder that `from_pretrained` replaces."""
    return device.type == "meta" and is_loading_pretrained()


def is_pretrained(parameter: Parameter) -> bool:
    """Return whether `from_pretrained` has read `parameter` from a file."""
    return bool(getattr(parameter, "_is_hf_initialized", False))
