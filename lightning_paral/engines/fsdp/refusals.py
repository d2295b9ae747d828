"""Reject what FSDP2 would silently ignore or do wrong, and explain the errors of torch about DTensors."""

import re
from collections.abc import Iterable
from typing import Any, NoReturn

from lightning.pytorch.callbacks import ModelPruning
from torch import Tensor
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn import Module

from lightning_paral.compat.torch.autograd import gradient_hooks, post_accumulate_grad_hooks
from lightning_paral.engines.fsdp.restore import LEFT_SHARDED
from lightning_paral.errors import ConfigurationError
from lightning_paral.model.units import Units

_INSTEAD = (
    "FSDP does not accumulate gradients through autograd, so the hook would never be called, or only with this rank's "
    "gradient. Read and change gradients in on_after_backward or on_before_optimizer_step, where they are "
    "averaged, or train with paral_ddp."
)


def check_module(module: Module) -> None:
    """Raise a `ConfigurationError` if FSDP1 wraps a submodule, or if an earlier run left `module` sharded."""
    if hasattr(module, LEFT_SHARDED):
        raise ConfigurationError(
            f"{type(module).__name__} was left sharded by an earlier run, which could not gather it: "
            f"{getattr(module, LEFT_SHARDED)}. Load a checkpoint into a new module."
        )
    for name, part in module.named_modules():
        if isinstance(part, FullyShardedDataParallel):
            raise ConfigurationError(
                f"{name or type(module).__name__!r} is wrapped in torch's FullyShardedDataParallel (FSDP1), which "
                "cannot be combined with FSDP2. Leave the module unwrapped, so that the strategy shards it, or use "
                "fully_shard."
            )


def check_user_hooks(module: Module) -> None:
    """Raise a `ConfigurationError` if a parameter of `module` has hooks that FSDP2 would not call."""
    for name, parameter in module.named_parameters():
        hooks_by_method = {"register_post_accumulate_grad_hook": post_accumulate_grad_hooks(parameter)}
        if isinstance(parameter, DTensor):
            hooks_by_method["register_hook"] = gradient_hooks(parameter)
        for method, hooks in hooks_by_method.items():
            if hooks:
                hook = next(iter(hooks.values()))
                raise ConfigurationError(
                    f"{name} has a hook, {getattr(hook, '__qualname__', hook)!r}, from {method}. {_INSTEAD}"
                )


def refuse_hook(name: str, method: str) -> NoReturn:
    """Raise a `ConfigurationError`: `method` cannot register a hook on parameter `name`."""
    raise ConfigurationError(f"{method} was called on {name}. {_INSTEAD}")


def check_assigned(name: str, current: Any, value: Any) -> None:
    """Raise a `ConfigurationError` unless `value` has the shape, dtype and device type of `current`.

    Args:
        name: the name of the parameter, for the message.
        current: the parameter.
        value: the tensor that was assigned to `data`.
    """

    def describe(tensor: Tensor) -> str:
        return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')} on {tensor.device.type}"

    if describe(current) != describe(value):
        raise ConfigurationError(
            f"{name}.data was assigned a tensor of {describe(value)}, but the parameter is of {describe(current)}. "
            "Under FSDP, the shape, dtype and device of a parameter cannot change while it is sharded. Convert the "
            "value first, or change the module before training."
        )


def shares_memory(name: str) -> str:
    """Return the message for a parameter whose `data` was assigned the memory of another one."""
    return (
        f"{name}.data was assigned the memory of another parameter. In one process, both parameters would then share "
        "it; under FSDP they cannot. Copy the values: parameter.data.copy_(...)."
    )


def check_pruning(callbacks: Iterable[Any]) -> None:
    """Raise a `ConfigurationError` for callbacks that prune, since they replace parameters after these are sharded."""
    for callback in callbacks:
        if isinstance(callback, ModelPruning):
            raise ConfigurationError(
                f"{type(callback).__name__} replaces weights by weight_orig and weight_mask during the run, and FSDP "
                "cannot shard them again. Train with paral_ddp, or prune in __init__ with torch.nn.utils.prune."
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


MIXED = "mixed torch.Tensor and DTensor"
_CAUSES: dict[str, str] = {
    "RegisterPostBackwardFunction.*is a view and is being modified inplace": (
        "A unit changes one of its inputs in place (units: {units}). FSDP passes inputs that need gradients through a "
        "function of its own, whose results cannot be changed in place. Write x = x + y instead of x += y, or choose "
        "units=[...] that do not change their inputs."
    ),
    "appears to not have been used in the graph": (
        "The gradient by a weight was computed, as by torch.autograd.grad. Weights of units (units: {units}) are "
        "sharded: the step computes with the unsharded weight of the unit. Only gradients by inputs and by weights "
        "outside of units can be computed in a step. Read others after the backward pass, with "
        "trainer.strategy.full_gradient(parameter), or train with paral_ddp."
    ),
    "storage of size 0": (
        "A weight was used after it had been resharded. FSDP unshards the weights of a unit for its forward pass and "
        "for one backward pass, but a gradient penalty with torch.autograd.grad(create_graph=True) needs a second "
        "backward pass. Train with paral_ddp or paral_zero2."
    ),
    r"returning a view \(or an input as-is\) but the jvp|must implement the jvp function"
    "|Cannot access storage of TensorWrapper": (
        "A unit got a tensor of forward-mode differentiation, or of a transform of torch.func (units: {units}). FSDP "
        "passes inputs through a function of its own, which has neither. Use torch.autograd.grad, or paral_ddp."
    ),
    "Inplace update to inference tensor|Inference tensors do not track version": (
        "A hook called the module in torch.inference_mode, where FSDP has created memory that it cannot reuse in "
        "training. Use torch.no_grad."
    ),
    r"FSDP does not support deepcopy|copy_\(\) on an invalid python storage": (
        "A module that is sharded was copied with copy.deepcopy (units: {units}). Copy it before it is sharded, in "
        "__init__ or configure_model, and update the copy with load_state_dict."
    ),
    f"{MIXED}|sharding strategy|placement changes|unevenly sharded|as_strided not supported with DTensor"
    "|along the sharded dimension|Sharding propagation failed": (
        "torch cannot do this operation on sharded tensors (DTensors), or on sharded and plain tensors together. In "
        "hooks, parameters, gradients and optimizer state are sharded. Do it on tensor.full_tensor(), on all ranks, and"
        " write the result back with parameter.copy_(result), or do it in a step, where the root's parameters are "
        "unsharded."
    ),
}
"""What errors of torch mean, by a pattern of their messages."""
_MIXED_IN_STEP = (
    "A weight was used outside of its unit, where it is sharded (a DTensor), together with plain tensors. Units: "
    "{units}. Use it in a method of its unit, or choose units=[...] that leave it to the root, which stays unsharded "
    "throughout a step. Create modules in __init__ or configure_model: modules that are created later, or copied from "
    "sharded ones, are not unsharded."
)


def explanation(error: BaseException, *, units: Units, in_step: bool) -> str | None:
    """Return the cause of `error` and what to do about it; `None` if the error is not about sharding.

    Args:
        error: an error that torch raised.
        units: the units of the sharded module.
        in_step: whether it was raised inside a step, not in a hook.
    """
    names = [unit.name for unit in units.inner]
    listed = f"{', '.join(names[:8])}{' and others' if len(names) > 8 else ''}" if names else "none but the root"
    found = (text for pattern, text in _CAUSES.items() if re.search(pattern, str(error), re.DOTALL))
    cause = _MIXED_IN_STEP if MIXED in str(error) and in_step else next(found, None)
    return None if cause is None else cause.replace("{units}", listed)
