"""The hooks in which stage 3 looks for parameters among the outputs of modules."""

from collections.abc import Callable
from typing import Any

from torch.nn import Module

from lightning_paral.compat.private_name import Names, named
from lightning_paral.compat.torch.module_hooks import forward_hooks

NAMES: Names = {
    "deepspeed.runtime.zero.parameter_offload.DeepSpeedZeRoOffload._register_deepspeed_module": {
        "._post_forward_module_hook": "let modules return objects of any type (deepspeed#7442)",
    },
}


def show_outputs_as(module: Module, view: Callable[[Any], Any]) -> None:
    """Pass `view(output)` instead of the output to DeepSpeed's hooks on `module` and its submodules.

    Args:
        module: the module of a stage-3 engine.
        view: called with the output of a module; returns the object to pass.
    """
    root_has_one, *_ = [_replace(part, view) for part in module.modules()]
    if not root_has_one:
        raise named(NAMES, "_post_forward_module_hook").error(
            f"the engine has registered no hook of that name on {type(module).__name__}"
        )


def _replace(part: Module, view: Callable[[Any], Any]) -> bool:
    hooks = forward_hooks(part)
    found = [key for key, hook in hooks.items() if _looks_for_parameters(hook)]
    for key in found:
        hooks[key] = _with_view(hooks[key], view)
    return bool(found)


def _looks_for_parameters(hook: Any) -> bool:
    # DeepSpeed wraps the hook in a function for profiling, which has a different name.
    functions = [hook, *(cell.cell_contents for cell in getattr(hook, "__closure__", None) or ())]
    return any(getattr(function, "__name__", "") == "_post_forward_module_hook" for function in functions)


def _with_view(hook: Callable[..., Any], view: Callable[[Any], Any]) -> Callable[..., Any]:
    def run(module: Module, inputs: Any, output: Any) -> None:
        hook(module, inputs, view(output))

    return run
