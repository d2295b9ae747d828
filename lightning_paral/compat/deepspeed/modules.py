"""What DeepSpeed sets on the modules of a stage-3 engine, and the dictionaries that it replaces."""

from typing import Any

from torch.nn import Module

from lightning_paral.compat.private_name import PrivateName
from lightning_paral.compat.torch.modules import own_parameters

_OFFLOAD = "deepspeed.runtime.zero.parameter_offload"
_OF_THE_ENGINE = ("pre_bwd_fn", "post_bwd_fn", "applied_pre_backward_ref_cnt")
_LEFT = "to restore modules after a run: what is left on them would call the ended engine, or keep its memory"
_DESTROY = "engine.destroy removes only its hooks"

NAMES = (
    PrivateName(
        name=f"{_OFFLOAD}.ZeROOrderedDict._in_forward",
        purpose="to end a forward that a failure has interrupted",
        reason="DeepSpeed ends it only when the forward returns",
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
        for name in _OF_THE_ENGINE
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
    """Mark the forward of `module` itself as ended."""
    parameters: Any = own_parameters(module)
    if hasattr(parameters, "_in_forward"):
        parameters._in_forward = False


def is_engine_attribute(name: str) -> bool:
    """Whether an attribute of a module belongs to the engine and calls it."""
    return name in _OF_THE_ENGINE


def is_zero_attribute(name: str) -> bool:
    """Whether an attribute of a module belongs to its parameters as sharded by stage 3."""
    return name.startswith(("ds_", "_ds_", "_external_params", "_original_parameters", "all_parameters"))


def restore_container(module: Module, kind: type) -> None:
    """Keep the parameters of `module` in a dictionary of class `kind` again."""
    current: Any = own_parameters(module)
    if type(current) is not kind:
        # DeepSpeed's dictionary gathers a parameter when it is read by key.
        plain = kind(current.items())
        del module._parameters
        module._parameters = plain
