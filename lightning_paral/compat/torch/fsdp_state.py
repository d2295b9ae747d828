"""What FSDP2 keeps of a sharded module, and does around its `forward`.

`fully_shard` hooks into `forward` alone. Steps and other methods of a module need the same around them;
`register_fsdp_forward_method` does it for methods, but lets go as soon as a nested call ends.
"""

from typing import Any

from torch import Tensor
from torch.distributed._composable_state import _module_state_mapping
from torch.nn import Module

from lightning_paral.compat.private_name import PrivateName

_STATE = "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState"
_SEEN = "torch 2.11 to 2.13"
_AROUND = "only forward is public, and a step of the LightningModule is none"

NAMES = (
    PrivateName(
        name="torch.distributed.fsdp.FSDPModule._get_fsdp_state",
        purpose="to gather parameters around steps and methods",
        reason=_AROUND,
        seen=_SEEN,
        parameters=("self",),
    ),
    PrivateName(
        name=f"{_STATE}._lazy_init",
        purpose="to know the groups of parameters before the first step",
        reason="FSDP2 makes them ready in the first forward, after hooks of users have run",
        seen=_SEEN,
        parameters=("self",),
    ),
    PrivateName(
        name=f"{_STATE}._pre_forward",
        purpose="to gather parameters before a step or a method",
        reason="FSDPModule.unshard gathers, but does not prepare the backward pass and the next units",
        seen=_SEEN,
        parameters=("self", "module", "args", "kwargs"),
    ),
    PrivateName(
        name=f"{_STATE}._post_forward",
        purpose="to let go of parameters after a step or a method, until its backward pass",
        reason="FSDPModule.reshard lets go, but does not have the backward pass gather anew",
        seen=_SEEN,
        parameters=("self", "module", "input", "output"),
    ),
    PrivateName(
        name=f"{_STATE}._register_pre_backward_hook",
        purpose="to have the root's gradients reduced in a backward pass of manual optimization",
        reason=_AROUND,
        seen=_SEEN,
        parameters=("self", "output"),
    ),
    *(
        PrivateName(
            name=f"{_STATE}.{handle}",
            purpose="to take FSDP2's own hooks off forward, where ours do their work",
            reason=_AROUND,
            seen=_SEEN,
            on_instances=True,
        )
        for handle in ("_pre_forward_hook_handle", "_post_forward_hook_handle")
    ),
    PrivateName(
        name=f"{_STATE}._fsdp_param_groups",
        purpose="to find the parameters that are gathered together",
        reason="nothing public names them",
        seen="torch 2.12 and 2.13",
        on_instances=True,
        since="2.12",
    ),
    PrivateName(
        name=f"{_STATE}._fsdp_param_group",
        purpose="to find the parameters that are gathered together",
        reason="nothing public names them",
        seen="torch 2.11",
        on_instances=True,
        before="2.12",
    ),
    *(
        PrivateName(
            name=f"torch.distributed.fsdp.fully_shard.{attribute}",
            purpose="to leave out of saved modules what FSDP2 has set on them",
            reason="fully_shard cannot be undone",
            seen=_SEEN,
            on_instances=True,
        )
        for attribute in ("_is_fsdp_managed_module", "_fsdp_use_orig_params")
    ),
    PrivateName(
        name="torch.distributed._composable_state._module_state_mapping",
        purpose="to give a module back after a run, as if it had never been sharded",
        reason="fully_shard cannot be undone",
        seen=_SEEN,
    ),
)


class ForwardHooks:
    """Takes the hooks of a sharded module off its `forward`, for the caller to do their work."""

    def __init__(self, module: Any) -> None:
        state = module._get_fsdp_state()
        state._pre_forward_hook_handle.remove()
        state._post_forward_hook_handle.remove()
        self.state = state
        self._module = module

    def after(self, output: Any) -> Any:
        """Let go of parameters; return `output`, which has the backward pass gather them anew."""
        return self.state._post_forward(self._module, (), output)

    def expect_backward(self, output: Tensor) -> None:
        """Have the backward pass of `output` reduce the gradients of the module."""
        self.state._register_pre_backward_hook(output)


def initialize(root: Any) -> None:
    """Do what FSDP2 does once, at the beginning of the first forward of the sharded module `root`."""
    root._get_fsdp_state()._lazy_init()


def groups_of(module: Any) -> list[Any]:
    """Return the `FSDPParamGroup`s of a sharded module; before torch 2.12 there was at most one."""
    return groups_of_state(module._get_fsdp_state())


def groups_of_state(state: Any) -> list[Any]:
    """Return the `FSDPParamGroup`s of a sharded module by its state."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def is_of_fsdp(name: str) -> bool:
    """Whether an attribute of a module is one that `fully_shard` sets."""
    return name.startswith(("_fsdp", "_is_fsdp", "__composable_api_state_key"))


def forget(module: Module) -> None:
    """Let FSDP2 forget that `module` was sharded."""
    _module_state_mapping.pop(module, None)
