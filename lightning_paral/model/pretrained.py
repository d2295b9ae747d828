"""`from_pretrained` of transformers in `configure_model`: when it runs, and what it makes only to replace it.

It builds the model on the meta device, puts tensors in place that lie in mapped files, and draws what the files lack.
Values are those of one process if that is left as it is: nothing is drawn, copied or divided before its time.
"""

import sys

import torch
from torch.nn import Parameter


def is_loading() -> bool:
    """Whether the caller was called, by whatever way, by `PreTrainedModel.from_pretrained`.

    It is looked for among the callers: a patch of it would come too late for `configure_model`s that import
    transformers themselves, and transformers is not imported for those that do not.
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
    """Whether what the caller is about to make on `device` is only there for its shape and dtype."""
    return device.type == "meta" and is_loading()


def was_loaded(parameter: Parameter) -> bool:
    """Whether `from_pretrained` has read `parameter` from a file."""
    return bool(getattr(parameter, "_is_hf_initialized", False))
