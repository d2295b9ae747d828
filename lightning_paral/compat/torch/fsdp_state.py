"""FSDP2's state of a sharded module, and the hooks that it runs around `forward`.

`fully_shard` registers hooks only around `forward`. Steps and other methods of a module need the same hooks. torch's
`register_fsdp_forward_method` registers them for methods, but reshards as soon as a nested call ends.
"""

from typing import Any

from torch import Tensor
from torch.distributed._composable_state import _module_state_mapping
from torch.nn import Module

from lightning_paral.compat.private_name import Names

NAMES: Names = {
    "torch.distributed.fsdp.FSDPModule": {"_get_fsdp_state": "unshard parameters around steps and methods"},
    "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState": {
        "_lazy_init": "know the parameter groups before the first step",
        "_pre_forward(module, args, kwargs)": "unshard parameters before a step or a method",
        "_post_forward(module, input, output)": "reshard between a step and its backward pass",
        "_register_pre_backward_hook(output)": "reduce the root's gradients under manual optimization",
        "._pre_forward_hook_handle": "remove FSDP2's hooks from forward, which ours replace",
        "._post_forward_hook_handle": "remove FSDP2's hooks from forward, which ours replace",
        "._fsdp_param_groups >=2.12": "find the parameters that are gathered together",
        "._fsdp_param_group <2.12": "find the parameters that are gathered together",
    },
    "torch.distributed.fsdp.fully_shard": {
        "._is_fsdp_managed_module": "leave FSDP2's attributes out of saved modules",
        "._fsdp_use_orig_params": "leave FSDP2's attributes out of saved modules",
    },
    "torch.distributed._composable_state": {
        "_module_state_mapping": "restore a module after a run, as if it had never been sharded",
    },
}


class ForwardHooks:
    """Removes FSDP2's hooks from the `forward` of a sharded module. The caller must do their work instead."""

    def __init__(self, module: Any) -> None:
        state = module._get_fsdp_state()
        state._pre_forward_hook_handle.remove()
        state._post_forward_hook_handle.remove()
        self.state = state
        self._module = module

    def after(self, output: Any) -> Any:
        """Reshard the parameters after forward; return `output`, whose backward pass unshards them again."""
        return self.state._post_forward(self._module, (), output)

    def expect_backward(self, output: Tensor) -> None:
        """Make the backward pass of `output` reduce the gradients of the module."""
        self.state._register_pre_backward_hook(output)


def initialize(root: Any) -> None:
    """Initialize FSDP2 for the sharded module `root`, as its first forward would."""
    root._get_fsdp_state()._lazy_init()


def groups_of(module: Any) -> list[Any]:
    """Return the `FSDPParamGroup`s of a sharded module: before torch 2.12, at most one."""
    return groups_of_state(module._get_fsdp_state())


def groups_of_state(state: Any) -> list[Any]:
    """Return the `FSDPParamGroup`s of the sharded module whose `FSDPState` is `state`."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def is_fsdp_attribute(name: str) -> bool:
    """Return whether `name` is an attribute that `fully_shard` sets on modules."""
    return name.startswith(("_fsdp", "_is_fsdp", "__composable_api_state_key"))


def forget(module: Module) -> None:
    """Make FSDP2 forget that `module` was sharded."""
    _module_state_mapping.pop(module, None)
