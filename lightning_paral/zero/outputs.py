"""What modules may return at stage 3: anything, as everywhere else."""

from typing import Any

from torch import Tensor
from torch.nn import Module

from lightning_paral.compat.deepspeed.output_hooks import show_outputs_as


def allow_any_output(module: Module) -> None:
    """Let every module in `module` return what it likes; its hooks of stage 3 see the tensors only.

    DeepSpeed 0.19.8 looks for parameters among the outputs of every module, by `vars(output)`, which numbers and
    strings do not have, and by `startswith` on the keys of dictionaries. Steps are outputs, too: `predict_step` may
    return a class, or a file's name.

    Args:
        module: that of an engine of stage 3.
    """
    show_outputs_as(module, _tensors_in)


def _tensors_in(output: Any) -> list[Tensor]:
    if isinstance(output, Tensor):
        return [output]
    if isinstance(output, (list, tuple)):
        values: Any = output
    else:
        values = (output if isinstance(output, dict) else getattr(output, "__dict__", {})).values()
    return [value for value in values if isinstance(value, Tensor)]
