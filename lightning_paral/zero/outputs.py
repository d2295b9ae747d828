"""What modules may return at stage 3: anything, as everywhere else."""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn import Module


def allow_any_output(module: Module) -> None:
    """Let every module in `module` return what it likes; its hooks of stage 3 see the tensors only.

    DeepSpeed 0.19.8 looks for parameters among the outputs of every module, by `vars(output)`, which numbers and
    strings do not have, and by `startswith` on the keys of dictionaries. Steps are outputs, too: `predict_step` may
    return a class, or a file's name.
    """
    for part in module.modules():
        for key, hook in list(part._forward_hooks.items()):
            if _looks_for_parameters(hook):
                part._forward_hooks[key] = _of_tensors_only(hook)


def _looks_for_parameters(hook: Any) -> bool:
    # It is found inside the wrapper of DeepSpeed's profiling, which has a name of its own.
    functions = [cell.cell_contents for cell in getattr(hook, "__closure__", None) or ()]
    return any(getattr(function, "__name__", "") == "_post_forward_module_hook" for function in functions)


def _of_tensors_only(hook: Callable[..., Any]) -> Callable[..., Any]:
    def run(module: Module, inputs: Any, output: Any) -> None:
        hook(module, inputs, _tensors_in(output))

    return run


def _tensors_in(output: Any) -> list[Tensor]:
    if isinstance(output, Tensor):
        return [output]
    if isinstance(output, (list, tuple)):
        values: Any = output
    else:
        values = (output if isinstance(output, dict) else getattr(output, "__dict__", {})).values()
    return [value for value in values if isinstance(value, Tensor)]
