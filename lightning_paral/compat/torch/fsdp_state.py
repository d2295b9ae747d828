"""FSDP2's state of a sharded module, and the hooks that it runs around `forward`.

`fully_shard` registers hooks only around `forward`. Steps and other methods of a module need the same hooks. torch's
`register_fsdp_forward_method` registers them for methods, but reshards as soon as a nested call ends.
"""

from typing import Any

from torch import Tensor
from torch.distributed._composable_state import _module_state_mapping
from torch.nn import Module

from lightning_paral.compat.private_name import PrivateName

_STATE = "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState"
_SEEN = "torch 2.11 to 2.13"
_AROUND = "public functions run FSDP2's hooks around forward, but not around a LightningModule's steps"

NAMES = (
    PrivateName(
        name="torch.distributed.fsdp.FSDPModule._get_fsdp_state",
        purpose="to unshard parameters around steps and methods",
        reason=_AROUND,
        seen=_SEEN,
        parameters=("self",),
    ),
    PrivateName(
        name=f"{_STATE}._lazy_init",
        purpose="to know the parameter groups before the first step",
        reason="FSDP2 initializes them in the first forward, after users' hooks have run",
        seen=_SEEN,
        parameters=("self",),
    ),
    PrivateName(
        name=f"{_STATE}._pre_forward",
        purpose="to unshard parameters before a step or a method",
        reason="FSDPModule.unshard prepares neither the backward pass nor the prefetching of the next units",
        seen=_SEEN,
        parameters=("self", "module", "args", "kwargs"),
    ),
    PrivateName(
        name=f"{_STATE}._post_forward",
        purpose="to reshard parameters between a step or a method and its backward pass",
        reason="FSDPModule.reshard does not make the backward pass unshard again",
        seen=_SEEN,
        parameters=("self", "module", "input", "output"),
    ),
    PrivateName(
        name=f"{_STATE}._register_pre_backward_hook",
        purpose="to reduce the root's gradients in a backward pass under manual optimization",
        reason=_AROUND,
        seen=_SEEN,
        parameters=("self", "output"),
    ),
    *(
        PrivateName(
            name=f"{_STATE}.{handle}",
            purpose="to remove FSDP2's hooks from forward, which ours replace",
            reason=_AROUND,
            seen=_SEEN,
            on_instances=True,
        )
        for handle in ("_pre_forward_hook_handle", "_post_forward_hook_handle")
    ),
    PrivateName(
        name=f"{_STATE}._fsdp_param_groups",
        purpose="to find the parameters that are gathered together",
        reason="no public name lists them",
        seen="torch 2.12 and 2.13",
        on_instances=True,
        since="2.12",
    ),
    PrivateName(
        name=f"{_STATE}._fsdp_param_group",
        purpose="to find the parameters that are gathered together",
        reason="no public name lists them",
        seen="torch 2.11",
        on_instances=True,
        before="2.12",
    ),
    *(
        PrivateName(
            name=f"torch.distributed.fsdp.fully_shard.{attribute}",
            purpose="to leave FSDP2's attributes out of saved modules",
            reason="no public function removes these attributes or lists them",
            seen=_SEEN,
            on_instances=True,
        )
        for attribute in ("_is_fsdp_managed_module", "_fsdp_use_orig_params")
    ),
    PrivateName(
        name="torch.distributed._composable_state._module_state_mapping",
        purpose="to restore a module after a run, as if it had never been sharded",
        reason="no public function undoes fully_shard",
        seen=_SEEN,
    ),
)


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
