"""Refuse what user code does to parameters and gradients during a run, if a pipeline cannot do it."""

from collections.abc import Callable, Collection, Sequence
from typing import Any, NoReturn

from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from lightning_paral.compat.torch.autograd import gradient_hooks, post_accumulate_grad_hooks
from lightning_paral.compat.torch.modules import own_parameters
from lightning_paral.compat.torch.patches import replace_attributes
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


def refuse_new_parameters(
    known: Collection[Parameter], optimizers: Callable[[], Sequence[Optimizer]]
) -> Callable[[], None]:
    """Raise a `ConfigurationError` if an optimizer of the fit gets parameters that are not `known`.

    Args:
        known: the parameters of the divided module.
        optimizers: returns the optimizers of the fit.

    Returns:
        Callable[[], None]: a function that undoes this.
    """
    original = Optimizer.add_param_group

    def add_param_group(optimizer: Optimizer, group: dict[str, Any]) -> None:
        is_of_fit = any(each is optimizer for each in optimizers())
        given = group["params"] if is_of_fit else ()
        if any(each not in known for each in ([given] if isinstance(given, Tensor) else given)):
            raise ConfigurationError(
                f"{type(optimizer).__name__} got parameters that the module did not have when it was divided among the "
                "stages of a pipeline. Their gradients would not be averaged. Create modules in __init__ or "
                "configure_model, or train with paral_fsdp."
            )
        original(optimizer, group)

    return replace_attributes(Optimizer, {"add_param_group": add_param_group})


class ZeroGradGuard:
    """Decides what `zero_grad` does in a training step, in which the gradients of earlier steps are kept elsewhere.

    In the first step of an accumulation window, it does nothing: Lightning sets gradients to zero after the step. In
    the others, it raises a `ConfigurationError`.
    """

    def __init__(self) -> None:
        self._refuses: bool | None = None

    def begin_step(self, *, begins_window: bool) -> None:
        """Begin a step, which may begin an accumulation window."""
        self._refuses = not begins_window

    def end_step(self) -> None:
        """Let `zero_grad` do what it does outside of steps."""
        self._refuses = None

    def install(self) -> Callable[[], None]:
        """Replace `zero_grad` of modules and optimizers; return a function that undoes this."""
        undo = [
            replace_attributes(owner, {"zero_grad": self._guarded(owner.zero_grad)}) for owner in (Optimizer, Module)
        ]

        def undo_all() -> None:
            for each in reversed(undo):
                each()

        return undo_all

    def _guarded(self, original: Callable[..., None]) -> Callable[..., None]:
        def zero_grad(owner: Any, *args: Any, **kwargs: Any) -> None:
            if self._refuses:
                raise ConfigurationError(
                    "zero_grad was called in training_step, while gradients of earlier batches accumulate. In a "
                    "pipeline, training_step runs once per micro-batch, so it would not remove them as in one process. "
                    "Leave it out: Lightning calls zero_grad before each accumulation window."
                )
            if self._refuses is None:
                original(owner, *args, **kwargs)

        return zero_grad
