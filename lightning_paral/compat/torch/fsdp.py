"""FSDP2: the state of sharded modules, their groups of parameters, and the parameters themselves."""

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.distributed._composable_state import _module_state_mapping
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fully_shard import cls_to_fsdp_cls
from torch.nn import Module

from lightning_paral.compat.private_name import Names, named, replace
from lightning_paral.compat.torch.modules import subclass_of

NAMES: Names = {
    "torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam": {
        ".sharded_param": "find the shard of a parameter",
        "._unsharded_param": "find the unsharded parameter",
        ".is_dtensor": "unshard parameters that all tensor ranks have in full to plain tensors",
        "._unsharded_dtensor_spec >=2.13": "unshard parameters that all tensor ranks have in full to plain tensors",
    },
    "torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup": {
        "unshard": "copy writes back to the shards before they are gathered",
        "_to_unsharded": "call a function after parameters are unsharded",
        "post_forward(module, input, output)": "copy weights that a unit returns, whose memory is freed",
        "post_backward": "read attributes of shards without the dispatch that hooks need",
        "_to_sharded": "copy writes back to the shards before they are resharded",
        ".fsdp_params": "find the parameters of a unit",
        "._reshard_after_forward_event": "make the next all-gather of a unit wait for writes to its shards",
    },
    "torch.distributed.fsdp.FSDPModule": {"_get_fsdp_state": "unshard parameters around steps"},
    "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState": {
        "_lazy_init": "know the parameter groups before the first step",
        "_pre_forward(module, args, kwargs)": "unshard parameters before a step",
        "_post_forward(module, input, output)": "reshard between a step and its backward pass",
        "_pre_backward(grad)": "unshard parameters before the backward pass of tensors in objects that a unit returns",
        "_root_post_backward_final_callback": "reduce gradients of a backward pass that FSDP2 has not noticed",
        "._pre_forward_hook_handle": "remove FSDP2's hooks from forward, which ours replace",
        "._post_forward_hook_handle": "remove FSDP2's hooks from forward, which ours replace",
        "._fsdp_param_groups >=2.12": "find the parameters that are gathered together",
        "._fsdp_param_group <2.12": "find the parameters that are gathered together",
    },
    "torch.distributed._composable_state": {
        "_module_state_mapping": "restore a module after a run, as if it had never been sharded",
    },
    "torch.distributed.fsdp._fully_shard._fully_shard": {
        "cls_to_fsdp_cls": "name the class of a sharded module as the user's class",
    },
}


# FSDP2's private object for a parameter, `FSDPParam`, which has the sharded and the unsharded parameter


def unsharded_param(param: Any) -> Tensor | None:
    """Return the unsharded parameter of an `FSDPParam`, or `None` if it has never been unsharded.

    The result is the same object each time: FSDP2 frees and refills its memory.
    """
    return getattr(param, "_unsharded_param", None)


def unshard_replicas_to_plain(param: Any) -> None:
    """Unshard an `FSDPParam` to an ordinary tensor if all tensor ranks have it in full. Call it after `fully_shard`.

    FSDP2 would unshard it to a DTensor, which cannot be combined with the activations, ordinary tensors.
    """
    if param.is_dtensor and param.sharded_param.placements[-1].is_replicate():
        replace(param, "is_dtensor", False)
        if hasattr(param, "_unsharded_dtensor_spec"):  # from torch 2.13 on, it decides what the parameter becomes
            replace(param, "_unsharded_dtensor_spec", None)


# Callbacks for when FSDP2 unshards and reshards a group of parameters


def watch(
    group: Any,
    before_gather: Callable[[], None],
    after_unshard: Callable[[], None],
    before_reshard: Callable[[], bool],
    after_forward: Callable[[Any], Any],
    before_reduce: Callable[[], None],
) -> None:
    """Call functions whenever the parameters of `group` are unsharded or resharded, as long as `group` exists.

    Args:
        group: an `FSDPParamGroup`.
        before_gather: called before the shards are gathered, also if they are unsharded already.
        after_unshard: called after parameters have been unsharded.
        before_reshard: called before parameters are resharded; returns whether to reshard them.
        after_forward: called with the output of `forward` before parameters are resharded after it; returns the output
            to use in its place.
        before_reduce: called after a backward pass through the group, before gradients are reduced.

    Raises:
        PrivateNameError: this version of torch unshards or reshards in a different way.
    """
    for method in ("unshard", "_to_unsharded", "post_forward", "post_backward", "_to_sharded"):
        named(NAMES, method).resolve()
    gather, unshard, reduce, reshard = group.unshard, group._to_unsharded, group.post_backward, group._to_sharded
    end_forward = group.post_forward

    def gather_shards(*args: Any, **kwargs: Any) -> None:
        before_gather()
        gather(*args, **kwargs)

    def to_unsharded() -> None:
        with torch.DisableTorchFunctionSubclass():  # it reads an attribute of each shard
            unshard()
        after_unshard()

    def post_forward(module: Any, args: Any, output: Any) -> Any:
        return end_forward(module, args, after_forward(output))

    def post_backward(*args: Any) -> None:
        with torch.DisableTorchFunctionSubclass():
            before_reduce()
            reduce(*args)

    def to_sharded() -> None:
        with torch.DisableTorchFunctionSubclass():  # what our own code does to shards is no access of the user's
            if before_reshard():
                reshard()

    group.unshard, group._to_unsharded, group.post_backward = gather_shards, to_unsharded, post_backward
    group._to_sharded, group.post_forward = to_sharded, post_forward


def reshard(group: Any) -> None:
    """Reshard the parameters of `group`, even where FSDP2 would keep those of the root."""
    group._to_sharded()


def await_writes(group: Any, device_type: str) -> None:
    """Make the next all-gather of `group` wait for writes to the shards that are queued on the current stream.

    Args:
        group: an `FSDPParamGroup`.
        device_type: the type of the devices that gather.
    """
    event = torch.get_device_module(device_type).Event()
    event.record()
    # `unshard` waits for this event. To wait now would delay the all-gather of the next unit as well.
    group._reshard_after_forward_event = event


# FSDP2's state of a sharded module, and the hooks that it runs around `forward`
#
# In torch 2.11 to 2.13, an iteration begins only in the hook around `forward` of the root, and no public function
# begins one in a step.


class ForwardHooks:
    """Removes FSDP2's hooks from the `forward` of a sharded module. The caller must do their work instead."""

    def __init__(self, module: Any) -> None:
        self._state = module._get_fsdp_state()
        self._state._pre_forward_hook_handle.remove()
        self._state._post_forward_hook_handle.remove()
        self._module = module

    def before(self) -> None:
        """Unshard the parameters before forward."""
        # Without arguments, `torch.distributed.utils._to_kwargs` raises an IndexError on CUDA in torch 2.11 and 2.12.
        self._state._pre_forward(self._module, (None,), {})

    def after(self, output: Any) -> Any:
        """Reshard the parameters after forward; return `output`, whose backward pass unshards them again."""
        return self._state._post_forward(self._module, (), output)

    def end_backward(self) -> None:
        """Reduce the gradients that a backward pass has left on unsharded parameters, and reshard. *Collective*."""
        self._state._root_post_backward_final_callback()


def initialize(root: Any) -> None:
    """Initialize FSDP2 for the sharded module `root`, as its first forward would."""
    root._get_fsdp_state()._lazy_init()


def unshard_before_backward(module: Any, tensor: Tensor) -> None:
    """Unshard the parameters of a sharded module before the backward pass reaches `tensor`, which it has returned."""
    tensor.register_hook(module._get_fsdp_state()._pre_backward)  # type: ignore[no-untyped-call]


def groups_of(module: Any) -> list[Any]:
    """Return the `FSDPParamGroup`s of a sharded module: before torch 2.12, at most one."""
    state = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def forget(module: Module) -> None:
    """Make FSDP2 forget that `module` was sharded."""
    _module_state_mapping.pop(module, None)


# Classes of sharded modules that have the names of the user's classes, and can be created for every class


def prepare_class(module: Module) -> None:
    """Create the class that `fully_shard` assigns to `module`, in place of torch's (torch 2.11 to 2.13).

    torch's class has a name such as `FSDPLinear`, which appears in messages. torch cannot create it if `Generic` or
    another class without `__dict__` is the first base (`object layout differs`), or if `__init_subclass__` requires
    arguments. Metaclasses and `__init_subclass__` methods that register classes would also register torch's class.
    """
    original = type(module)
    if original not in cls_to_fsdp_cls and not issubclass(original, FSDPModule):
        cls_to_fsdp_cls[original] = subclass_of(original, FSDPModule, {"__deepcopy__": _refuse_deepcopy})


def _refuse_deepcopy(*_: Any) -> NoReturn:
    raise AssertionError("FSDP does not support deepcopy.")  # torch's own message, which a caller explains
