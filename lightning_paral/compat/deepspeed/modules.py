"""Attributes that DeepSpeed sets on the modules of a stage-3 engine, and dictionaries that it replaces."""

from typing import Any

from torch.nn import Module

from lightning_paral.compat.private_name import PrivateName
from lightning_paral.compat.torch.modules import own_parameters

_OFFLOAD = "deepspeed.runtime.zero.parameter_offload"
_ENGINE_ATTRIBUTES = ("pre_bwd_fn", "post_bwd_fn", "applied_pre_backward_ref_cnt")
_LEFT = "to remove it from modules after a run, because it would call the destroyed engine or keep its memory"
_DESTROY = "engine.destroy removes only the engine's hooks"

NAMES = (
    PrivateName(
        name=f"{_OFFLOAD}.ZeROOrderedDict._in_forward",
        purpose="to mark a forward that an exception has interrupted as ended",
        reason="DeepSpeed does so only when the forward returns",
        seen="deepspeed 0.19.8",
        on_instances=True,
    ),
    *(
        PrivateName(
            name=f"{_OFFLOAD}.DeepSpeedZeRoOffload._register_deepspeed_module.{name}",
            purpose=_LEFT,
            reason=_DESTROY,
            seen="deepspeed 0.19.8",
            on_instances=True,
        )
        for name in _ENGINE_ATTRIBUTES
    ),
    PrivateName(
        name=f"{_OFFLOAD}._inject_parameters._original_parameters",
        purpose=_LEFT,
        reason=_DESTROY,
        seen="deepspeed 0.19.8",
        on_instances=True,
    ),
    *(
        PrivateName(
            name=f"deepspeed.runtime.zero.partition_parameters._init_external_params.{name}",
            purpose=_LEFT,
            reason=_DESTROY,
            seen="deepspeed 0.19.8",
            on_instances=True,
        )
        for name in ("_external_params", "all_parameters")
    ),
)


def end_forward(module: Module) -> None:
    """Mark the forward of `module` as ended, but not those of its submodules."""
    parameters: Any = own_parameters(module)
    if hasattr(parameters, "_in_forward"):
        parameters._in_forward = False


def is_engine_attribute(name: str) -> bool:
    """Return whether `name` is an attribute of modules that belongs to the engine and calls it."""
    return name in _ENGINE_ATTRIBUTES


def is_zero_attribute(name: str) -> bool:
    """Return whether `name` is an attribute that stage 3 sets on parameters that it shards, or on their modules."""
    return name.startswith(("ds_", "_ds_", "_external_params", "_original_parameters", "all_parameters"))


def restore_container(module: Module, cls: type) -> None:
    """Replace DeepSpeed's dictionary of the parameters of `module` with a dictionary of class `cls`."""
    current: Any = own_parameters(module)
    if type(current) is not cls:
        # Copy the items, because DeepSpeed's dictionary gathers a parameter that is read by key.
        plain = cls(current.items())
        del module._parameters
        module._parameters = plain
