"""What modules may return at stage 3: anything, as everywhere else."""

from typing import Any

from torch import Tensor
from torch.nn import Module

from lightning_paral.compat.deepspeed.output_hooks import show_outputs_as


def allow_any_output(module: Module) -> None:
    """Let every module in `module` return any object; the hooks of stage 3 see only the tensors in it.

    DeepSpeed 0.19.8 looks for parameters in the output of every module, by `vars(output)`, which fails for numbers and
    strings, and by `startswith` on the keys of dictionaries. This includes what steps return: `predict_step` may return
    a class index, or a file name.

    Args:
        module: the module of a stage-3 engine.
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
