"""Detect `PreTrainedModel.from_pretrained` of transformers, so that nothing interferes with it.

It builds the model on the meta device, inserts tensors from memory-mapped files, and initializes the parameters that
the files lack. The values equal those in one process only if nothing else draws random numbers, or copies or shards
tensors, in between.
"""

import sys

from torch.nn import Parameter


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


def is_pretrained(parameter: Parameter) -> bool:
    """Return whether `from_pretrained` has read `parameter` from a file."""
    return bool(getattr(parameter, "_is_hf_initialized", False))
