"""Attributes that DeepSpeed sets on the modules of a stage-3 engine, and dictionaries that it replaces."""

from typing import Any

from torch.nn import Module

from lightning_paral.compat.private_name import Names
from lightning_paral.compat.torch.modules import own_parameters

_ENGINE_ATTRIBUTES = ("pre_bwd_fn", "post_bwd_fn", "applied_pre_backward_ref_cnt")

NAMES: Names = {
    "deepspeed.runtime.zero.parameter_offload.ZeROOrderedDict": {
        "._in_forward": "mark a forward that an exception has interrupted as ended",
    },
    "deepspeed.runtime.zero.parameter_offload.DeepSpeedZeRoOffload._register_deepspeed_module": {
        ".pre_bwd_fn": "remove it after a run: it would call or keep the destroyed engine",
        ".post_bwd_fn": "remove it after a run: it would call or keep the destroyed engine",
        ".applied_pre_backward_ref_cnt": "remove it after a run: it would call or keep the destroyed engine",
    },
    "deepspeed.runtime.zero.parameter_offload._inject_parameters": {
        "._original_parameters": "remove it after a run: it would call or keep the destroyed engine",
    },
    "deepspeed.runtime.zero.partition_parameters._init_external_params": {
        "._external_params": "remove it after a run: it would call or keep the destroyed engine",
        ".all_parameters": "remove it after a run: it would call or keep the destroyed engine",
    },
}


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
