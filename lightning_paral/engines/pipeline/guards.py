"""Refuse what user code does to parameters and gradients during a run, if a pipeline cannot do it."""

from collections.abc import Callable
from typing import Any, NoReturn

from torch.nn import Module, Parameter
from torch.optim import Optimizer

from lightning_paral.compat.torch.modules import own_parameters
from lightning_paral.compat.torch.patches import replace_attributes
from lightning_paral.compat.torch.tensor_hooks import gradient_hooks, post_accumulate_grad_hooks
from lightning_paral.errors import ConfigurationError


def hook_on_parameter(module: Module) -> str | None:
    """Return the error for a hook on the gradient of a parameter, or `None` if there is none."""
    for name, parameter in module.named_parameters():
        hook = next(iter((gradient_hooks(parameter) | post_accumulate_grad_hooks(parameter)).values()), None)
        if hook is not None:
            return (
                f"{name} has a hook, {getattr(hook, '__qualname__', hook)!r}, from register_hook or "
                "register_post_accumulate_grad_hook. In a pipeline, it would be called once per micro-batch, with a "
                "part of the gradient. Clip with Trainer(gradient_clip_val=...), or train with paral_ddp."
            )
    return None


def refuse_registrations(root: Module) -> Callable[[], None]:
    """Raise a `ConfigurationError` if a parameter is set or deleted in a module of `root`; return what undoes this.

    The gradient of a new parameter would not be averaged, and an optimizer would update the old one.
    """
    parts = {part: name for name, part in root.named_modules()}
    originals = (Module.register_parameter, Module.__delattr__)

    def refuse(module: Module, name: str) -> NoReturn:
        where = parts[module] or type(module).__name__
        raise ConfigurationError(
            f"Parameter {name!r} was set or deleted in {where} ({type(module).__name__}) while the module is divided "
            "among the stages of a pipeline. It would not be trained as in one process. Register parameters, prune and "
            "parametrize in __init__ or configure_model, or train with paral_ddp."
        )

    def register_parameter(module: Module, name: str, param: Parameter | None) -> None:
        if module in parts and own_parameters(module).get(name) is not param:
            refuse(module, name)
        originals[0](module, name, param)

    def delete(module: Module, name: str) -> None:
        if module in parts and name in own_parameters(module):
            refuse(module, name)
        originals[1](module, name)

    return replace_attributes(Module, {"register_parameter": register_parameter, "__delattr__": delete})


def refuse_zero_grad() -> Callable[[], None]:
    """Raise a `ConfigurationError` if gradients are set to zero; return a function that undoes this.

    For the steps of an accumulation window but its first: the gradients of those before are kept elsewhere.
    """

    def zero_grad(owner: Any, *args: Any, **kwargs: Any) -> NoReturn:
        raise ConfigurationError(
            "zero_grad was called in training_step, while gradients of earlier batches accumulate. In a pipeline, "
            "training_step runs once per micro-batch, so it would not remove them as in one process. Leave it out: "
            "Lightning calls zero_grad before each accumulation window."
        )

    of_optimizers = replace_attributes(Optimizer, {"zero_grad": zero_grad})
    of_modules = replace_attributes(Module, {"zero_grad": zero_grad})

    def undo() -> None:
        of_modules()
        of_optimizers()

    return undo
