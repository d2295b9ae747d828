"""Begin an iteration of FSDP2, and reset its state after an error.

In torch 2.11 to 2.13, an iteration begins only in `FSDPState._pre_forward`, a hook around the root's `forward`. No
public function begins one for `training_step`. The function that resets it, `FSDPModule.reset_iter_state`, is public
in torch 2.13.
"""

from typing import Any

import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

from lightning_paral.compat.private_name import Names

NAMES: Names = {
    "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState": {
        "_pre_forward(module, args, kwargs)": "begin an iteration of FSDP2 when a step begins",
        "._is_root": "reshard parameters that a failed iteration has left unsharded",
        "._state_ctx": "reshard parameters that a failed iteration has left unsharded",
        "._comm_ctx": "reshard parameters that a failed iteration has left unsharded",
        "._device_handle": "reshard parameters that a failed iteration has left unsharded",
        "._modules_to_run_forward": "reshard parameters that a failed iteration has left unsharded",
        "._training_state": "reshard parameters that a failed iteration has left unsharded",
        "._fsdp_param_group": "reshard parameters that a failed iteration has left unsharded",
    },
    "torch.distributed.fsdp._fully_shard._fsdp_common": {
        "TrainingState": "reshard parameters that a failed iteration has left unsharded",
    },
    "torch.distributed.fsdp.FSDPModule": {
        "_get_fsdp_state": "reshard parameters that a failed iteration has left unsharded",
    },
    "torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup": {
        "._all_gather_result": "reshard parameters that a failed iteration has left unsharded",
        "._post_reduce_event": "reshard parameters that a failed iteration has left unsharded",
        "._all_reduce_state": "reshard parameters that a failed iteration has left unsharded",
        "._reshard_after_forward_event": "reshard parameters that a failed iteration has left unsharded",
        "._wait_all_gather_streams_on_event": "reshard parameters that a failed iteration has left unsharded",
        "._partial_reduce_output": "reshard parameters that a failed iteration has left unsharded",
        "._post_forward_indices": "reshard parameters that a failed iteration has left unsharded",
        "._training_state": "reshard parameters that a failed iteration has left unsharded",
        "._to_sharded": "reshard parameters that a failed iteration has left unsharded",
    },
}


def pre_forward(
    state: Any, module: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
) -> tuple[Any, Any]:
    """Run the hook that FSDP2 runs before `forward` of a sharded module.

    Without arguments, the root's hook raises an IndexError on CUDA in torch 2.11 and 2.12, because it takes the first
    element of an empty list (`torch.distributed.utils._to_kwargs`). It therefore gets `None` as an argument.

    Args:
        state: the state of `module`, from `module._get_fsdp_state()`.
        module: the sharded module.
        args: the positional arguments of `forward`.
        kwargs: the keyword arguments of `forward`.

    Returns:
        `args` and `kwargs`, moved to the module's device.
    """
    if args or kwargs:
        moved: tuple[Any, Any] = state._pre_forward(module, args, kwargs or {})
        return moved
    state._pre_forward(module, (None,), {})
    return (), {}


def reset_iteration(root: Any) -> None:
    """Reset FSDP2's state of the sharded module `root` after a failed iteration, and reshard its parameters.

    The function does nothing if no iteration has begun, for example because sharding itself failed.
    """
    state = root._get_fsdp_state()
    if state._is_root is None:
        return
    if hasattr(root, "reset_iter_state"):  # torch 2.13 and later
        root.reset_iter_state()
        return
    shared, communication = state._state_ctx, state._comm_ctx
    stream = state._device_handle.current_stream()
    pending = [communication.all_gather_state]
    communication.all_gather_state = None
    if hasattr(communication, "reduce_scatter_states"):  # torch 2.12 and later
        pending += communication.reduce_scatter_states
        communication.reduce_scatter_states.clear()
    else:
        pending.append(communication.reduce_scatter_state)
        communication.reduce_scatter_state = None
    for each in pending:
        _wait(stream, None if each is None else each.event)
    communication.post_forward_order.clear()
    for each in shared.all_states:
        each._modules_to_run_forward.clear()
        each._training_state = TrainingState.IDLE
        for group in _groups(each):
            _reset_group(group, stream)
    shared.iter_forward_root = None
    shared.post_backward_final_callback_queued = False


def _reset_group(group: Any, stream: Any) -> None:
    gathered, reduced = group._all_gather_result, group._all_reduce_state
    if gathered is not None:
        _wait(stream, gathered.all_gather_event)
        if isinstance(gathered.all_gather_work, dist.Work):
            gathered.all_gather_work.wait()
    _wait(stream, group._post_reduce_event)
    _wait(stream, None if reduced is None else reduced.event)
    group._all_gather_result = group._post_reduce_event = group._all_reduce_state = None
    if group._reshard_after_forward_event is not None:
        group._wait_all_gather_streams_on_event(group._reshard_after_forward_event)
        group._reshard_after_forward_event = None
    group._partial_reduce_output = None
    group._post_forward_indices.clear()
    group._training_state = TrainingState.IDLE
    group._to_sharded()


def _groups(state: Any) -> list[Any]:
    groups = getattr(state, "_fsdp_param_groups", None)  # torch 2.12 and later
    if groups is None:
        groups = [] if state._fsdp_param_group is None else [state._fsdp_param_group]
    return list(groups)


def _wait(stream: Any, event: Any) -> None:
    if event is not None:
        stream.wait_event(event)
