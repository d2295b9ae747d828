"""Reject what FSDP2 would silently ignore or do wrong, and explain the errors of torch about DTensors."""

import re
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any, NoReturn

from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import ModelPruning
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Module, Parameter

from lightning_paral.compat.torch.autograd import gradient_hooks, post_accumulate_grad_hooks
from lightning_paral.compat.torch.dtensor import local_of
from lightning_paral.compat.torch.patches import replace_attributes
from lightning_paral.compat.torch.tensors import identity_of
from lightning_paral.errors import ConfigurationError
from lightning_paral.model.units import Units

_HOOK_METHODS = ("register_hook", "register_post_accumulate_grad_hook")
_INSTEAD = (
    "FSDP does not accumulate gradients through autograd, so the hook would never be called, or only with this rank's "
    "gradient. Read and change gradients in on_after_backward or on_before_optimizer_step, where they are "
    "averaged, or train with paral_ddp."
)


def check_user_hooks(module: LightningModule) -> None:
    """Raise a `ConfigurationError` if parameters have hooks that FSDP2 would not call, or a callback replaces them."""
    for callback in vars(module.trainer)["callbacks"]:
        if isinstance(callback, ModelPruning):
            raise ConfigurationError(
                f"{type(callback).__name__} replaces weights by weight_orig and weight_mask during the run, and FSDP "
                "cannot shard them again. Train with paral_ddp, or prune in __init__ with torch.nn.utils.prune."
            )
    for name, parameter in module.named_parameters():
        if gradient_hooks(parameter):
            refuse_hook(name, "register_hook")
        if post_accumulate_grad_hooks(parameter):
            refuse_hook(name, "register_post_accumulate_grad_hook")


def refuse_hooks(named: Callable[[], Iterable[tuple[str, Parameter]]], undo: ExitStack) -> None:
    """Refuse hooks on gradients of parameters, until `undo` is closed.

    Args:
        named: returns the parameters and their names: the shards, those that are unsharded in a step, those that are
            never sharded, and those that shards have replaced, of which code may have kept references.
        undo: a stack.
    """

    def refusing(method: str) -> Callable[..., Any]:
        register = getattr(Tensor, method)

        def call(tensor: Any, hook: Any) -> Any:
            name = next((name for name, each in named() if each is tensor), None)
            return register(tensor, hook) if name is None else refuse_hook(name, method)

        return call

    for owner in (Parameter, DTensor):  # not all tensors: FSDP2 registers hooks on activations
        undo.callback(replace_attributes(owner, {method: refusing(method) for method in _HOOK_METHODS}))


def refuse_hook(name: str, method: str) -> NoReturn:
    """Raise a `ConfigurationError`: `method` cannot register a hook on parameter `name`."""
    raise ConfigurationError(f"{method} was called on {name}. {_INSTEAD}")


def check_assigned(name: str, current: Any, value: Any, others: Iterable[Any]) -> None:
    """Raise a `ConfigurationError` unless `value` has the shape, dtype and device type of `current`, and own memory.

    Args:
        name: the name of the parameter, for the message.
        current: the parameter.
        value: the tensor that was assigned to `data`.
        others: the other parameters, whose memory it must not have.
    """

    def describe(tensor: Tensor) -> str:
        return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')} on {tensor.device.type}"

    if describe(current) != describe(value):
        raise ConfigurationError(
            f"{name}.data was assigned a tensor of {describe(value)}, but the parameter is of {describe(current)}. "
            "Under FSDP, the shape, dtype and device of a parameter cannot change while it is sharded. Convert the "
            "value first, or change the module before training."
        )
    memory, *of_others = [
        identity_of((local_of(each) if isinstance(each, DTensor) else each).untyped_storage())
        for each in (value, *others)
    ]
    if memory in of_others:
        raise ConfigurationError(
            f"{name}.data was assigned the memory of another parameter. In one process, both parameters would then "
            "share it; under FSDP they cannot. Copy the values: parameter.data.copy_(...)."
        )


def refuse_replaced(name: str, owner: Module) -> NoReturn:
    """Raise a `ConfigurationError`: parameter `name` of `owner` was replaced or deleted while it is sharded."""
    present = ", ".join(name for name, _ in owner.named_parameters(recurse=False)) or "none"
    raise ConfigurationError(
        f"{name} was replaced or deleted while it is sharded. Its {type(owner).__name__} now has these parameters: "
        f"{present}. FSDP would compute with its own weight, and neither shard nor save another. Register parameters, "
        "prune and parametrize in __init__ or configure_model; change values with parameter.copy_(...) or "
        "load_state_dict (without assign=True); use torch.func.functional_call in a step, in which the root's modules "
        "are unsharded; or train with paral_ddp."
    )


_CAUSES = {
    "RegisterPostBackwardFunction.*is a view and is being modified inplace": (
        "A unit changes one of its inputs in place. Write x = x + y instead of x += y, or choose units=[...] that do "
        "not change their inputs."
    ),
    "appears to not have been used in the graph": (
        "The gradient by a weight was computed, as by torch.autograd.grad, but the weights of units are sharded. Read "
        "it after the backward pass, with trainer.strategy.full_gradient(parameter)."
    ),
    "storage of size 0": (
        "A weight was used after it had been resharded. FSDP unshards it for the forward pass of its unit and for one "
        "backward pass; torch.autograd.grad(create_graph=True) needs a second one."
    ),
    r"returning a view \(or an input as-is\) but the jvp|must implement the jvp function"
    "|Cannot access storage of TensorWrapper": (
        "A unit got a tensor of forward-mode differentiation, or of a transform of torch.func. Use torch.autograd.grad."
    ),
    "number of tensors was saved during the original forward and recomputation": (
        "A function that torch.utils.checkpoint computes again uses weights outside of forward passes and methods of "
        "their modules, where they may be sharded. Use them in a forward pass, or checkpoint that of a module."
    ),
    "Inplace update to inference tensor|Inference tensors do not track version": (
        "A hook called the module in torch.inference_mode. Use torch.no_grad."
    ),
    r"FSDP does not support deepcopy|copy_\(\) on an invalid python storage": (
        "A sharded module was copied with copy.deepcopy. Copy it in __init__ or configure_model, and update the copy "
        "with load_state_dict."
    ),
    "mixed torch.Tensor and DTensor|sharding strategy|placement changes|unevenly sharded"
    "|as_strided not supported with DTensor|along the sharded dimension|Sharding propagation failed": (
        "A tensor was used where it is sharded (a DTensor), together with plain tensors, or in an operation that torch "
        "cannot do on shards. In a step, use a weight in a method of its unit, or choose units=[...] that leave it to "
        "the root, which is unsharded in steps. In a hook, use tensor.full_tensor() on all ranks, and write the result "
        "back with parameter.copy_(result)."
    ),
}
"""What errors of torch mean and what to do, by a pattern of their messages."""


def explanation(error: BaseException, units: Units) -> str | None:
    """Return the cause of `error` and what to do about it; `None` if the error is not about sharding.

    Args:
        error: an error that torch raised.
        units: the units of the sharded module.
    """
    cause = next((text for pattern, text in _CAUSES.items() if re.search(pattern, str(error), re.DOTALL)), None)
    names = [unit.name for unit in units.inner]
    listed = f"{', '.join(names[:8])}{' and others' if len(names) > 8 else ''}" if names else "none but the root"
    return None if cause is None else f"{cause} Or train with paral_ddp. The units are: {listed}."
