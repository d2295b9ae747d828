"""DeepSpeed's engine: backward passes, gradients and their norms, loss scale and dtype."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lightning_paral.compat.private_name import Names, replace

NAMES: Names = {
    "deepspeed.runtime.engine.DeepSpeedEngine": {
        "._running_engine_backward": "keep an engine from ending a backward pass on its own (deepspeed#7018)",
        "_backward_epilogue": "reduce an engine's gradients after a shared backward pass (deepspeed#7018)",
    },
    "deepspeed.runtime.base_optimizer.ZeROOptimizer": {
        "clear_backward_seen_flag": "begin and end a backward pass that several engines share",
        "backward_prologue": "begin and end a backward pass that several engines share",
        "enter_backward": "begin and end a backward pass that several engines share",
        "exit_backward": "begin and end a backward pass that several engines share",
        "needs_scaler": "know the scale of losses and gradients",
    },
    "deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer": {
        "finalize_gradient_accumulation_boundary": "end an accumulation window after its last backward pass",
        ".averaged_gradients": "clamp gradients; discard those of a window that ends without a step",
        ".all_grad_tensors": "discard the gradients of a window that ends without a step",
        ".micro_step_id": "discard the gradients of a window that ends without a step",
        ".offload_gradient_dict": "recompute the norms of gradients that have been changed",
        ".norm_for_param_grads": "recompute the norms of gradients that have been changed",
        ".params_in_partition": "recompute the norms of gradients that have been changed",
        "reset_cpu_buffers": "discard the gradients of a window that ends without a step",
        "get_param_id(param)": "recompute the norms of gradients that have been changed",
        "scaled_global_norm": "read the norm of gradients before the step that clips them",
        ".clip_grad": "clip gradients by the norm that Lightning passes for each step",
        "reduce_gradients(pipeline_parallel)": "reduce at stage 1 what hooks have not reduced",
        "reduce_ready_partitions_and_remove_grads(param, i)": "reduce at stage 1 what hooks have not reduced",
        "get_gradient_for_reduction(param)": "reduce at stage 1 what hooks have not reduced",
        "setup_buckets": "reduce at stage 1 what hooks have not reduced",
        ".ipg_buckets": "reduce at stage 1 what hooks have not reduced",
        ".params_already_reduced": "reduce at stage 1 what hooks have not reduced",
        ".overlap_comm": "reduce at stage 1 what hooks have not reduced",
        ".torch_autocast_gradscaler": "scale losses as torch.amp.GradScaler does",
        ".loss_scaler": "scale losses as torch.amp.GradScaler does",
        ".dynamic_loss_scale": "scale losses as torch.amp.GradScaler does",
        "loss_scale": "know the scale of losses and gradients",
        "_wait_for_offload_copies": "read or change gradients in host memory only after they have been copied there",
        "._offload_accumulated_param_ids": "discard the gradients of a window that ends without a step",
        ".accumulated_grads_in_cpu": "zero the sum of an earlier window if there is no gradient yet",
        ".grad_position": "zero a gradient of an earlier window in host memory if the parameter has no new one",
    },
    "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3": {
        "finalize_gradient_accumulation_boundary": "end an accumulation window after its last backward pass",
        "._offload_boundary_param_ids": "pass on offloaded gradients that a window's last backward pass did not make",
        ".norm_for_param_grads": "recompute the norms of gradients that have been changed",
        ".averaged_gradients": "clamp gradients",
        "._DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition": "zero a gradient of an earlier window",
        "get_param_id(param)": "recompute the norms of gradients that have been changed",
        "_get_norm_groups": "read the norm of gradients before the step that clips them",
        ".clip_grad": "clip gradients by the norm that Lightning passes for each step",
        ".torch_autocast_gradscaler": "scale losses as torch.amp.GradScaler does",
        ".loss_scaler": "scale losses as torch.amp.GradScaler does",
        ".dynamic_loss_scale": "scale losses as torch.amp.GradScaler does",
        "loss_scale": "know the scale of losses and gradients",
    },
    "deepspeed.runtime.zero.partition_parameters.InsertPostInitMethodToModuleSubClasses": {
        "_set_dtype(ds_config, dtype)": "keep the dtype of weights in files on NVMe",
    },
}


# Parts of `engine.backward`, for backward passes that several engines share


def begin_pass(optimizer: Any) -> None:
    """Tell `optimizer` that a backward pass begins. `engine.forward` does so only for the first pass after it."""
    optimizer.clear_backward_seen_flag()


def begin_shared_pass(engine: Any) -> None:
    """Tell the engine that a shared backward pass begins, which may reach its parameters."""
    begin_pass(engine.optimizer)
    engine.optimizer.backward_prologue()
    engine.optimizer.enter_backward()
    engine._running_engine_backward = True


def end_window(optimizer: Any) -> None:
    """End the accumulation window at stage 2 or 3, after the last backward pass before a step. *Collective*."""
    optimizer.finalize_gradient_accumulation_boundary()


def end_window_for(optimizer: Any, stage: int, parameters: Iterable[Any]) -> None:
    """Pass the offloaded gradients of `parameters` to the optimizer at the end of a window, at stage 2 or 3.

    In the last backward pass of a window, DeepSpeed passes only the gradients of parameters that this pass reaches;
    `parameters` are the others.
    """
    if stage == 3:
        name, missed = "_offload_boundary_param_ids", {parameter.ds_id for parameter in parameters}
    else:
        name, missed = "_offload_accumulated_param_ids", {optimizer.get_param_id(each) for each in parameters}
    all_ids = getattr(optimizer, name)
    setattr(optimizer, name, all_ids & missed)
    optimizer.finalize_gradient_accumulation_boundary()
    setattr(optimizer, name, all_ids)


def end_shared_pass(engine: Any) -> None:
    """Make the engine end backward passes on its own again."""
    engine._running_engine_backward = False


def end_unreached_pass(engine: Any) -> None:
    """End a backward pass that reached none of this engine's parameters."""
    engine.optimizer.exit_backward()


def end_reached_pass(engine: Any) -> None:
    """End a backward pass that reached this engine's parameters; reduce gradients. *Collective* over the world."""
    engine._backward_epilogue()


# The gradients of an accumulation window in DeepSpeed, and their norms


def forget_window(optimizer: Any, *, offloaded: bool) -> None:
    """Discard the gradients that stage 1 or 2 has accumulated since the last step."""
    for gradients in (optimizer.averaged_gradients, optimizer.all_grad_tensors):
        for group in gradients:
            gradients[group] = None
    optimizer.micro_step_id = -1
    if offloaded:
        optimizer.reset_cpu_buffers()


def zero_kept_gradient(optimizer: Any, parameter: Any, *, offloaded: bool) -> None:
    """Zero this rank's shard of the gradient of `parameter`, at stage 3."""
    optimizer._DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition[parameter.ds_id].zero_()
    if offloaded:
        optimizer.norm_for_param_grads.pop(optimizer.get_param_id(parameter), None)


def refresh_norms(optimizer: Any) -> None:
    """Recompute the norms of offloaded gradients that DeepSpeed keeps at stages 1 and 2."""
    for group, parameters in enumerate(optimizer.params_in_partition):
        for parameter, gradient in zip(parameters, optimizer.offload_gradient_dict[group], strict=True):
            index = optimizer.get_param_id(parameter)
            if index in optimizer.norm_for_param_grads:
                optimizer.norm_for_param_grads[index] = gradient.double().norm(2)


def scaled_norm(optimizer: Any, stage: int) -> Tensor:
    """Return the global 2-norm of the averaged gradients, in fp32 and multiplied by the loss scale. *Collective*."""
    if stage < 3:
        return torch.as_tensor(optimizer.scaled_global_norm()).float()
    squares = torch.stack([norm.float() ** 2 for norm in optimizer._get_norm_groups()])
    return squares.sum().sqrt()


def clamp_gradients(optimizer: Any, stage: int, limit: float, *, offloaded: bool) -> None:
    """Clamp each element of the averaged gradients to `[-limit, limit]`, in place, without communication.

    Args:
        optimizer: DeepSpeed's optimizer, which has the gradients of a complete accumulation window.
        stage: the stage of ZeRO.
        limit: the limit, already multiplied by the loss scale, because the gradients are.
        offloaded: whether the optimizer runs on the host.
    """
    from deepspeed.utils import safe_get_local_grad, safe_set_local_grad

    if stage == 3 and offloaded:
        for parameter in [parameter for group in optimizer.fp16_groups for parameter in group]:
            # The gradient may be on NVMe: the tensor that was read is a copy, and must be written back.
            safe_set_local_grad(parameter, safe_get_local_grad(parameter).clamp_(-limit, limit))
    elif offloaded:
        for partition in optimizer.single_partition_of_fp32_groups:
            partition.grad.clamp_(-limit, limit)
        refresh_norms(optimizer)
    else:
        for group in optimizer.averaged_gradients.values():
            for gradient in group or ():
                gradient.clamp_(-limit, limit)


# The norm to which DeepSpeed's optimizers clip gradients in a step


def clip_next_step(optimizer: Any, max_norm: float) -> None:
    """Make the next step clip gradients to a global 2-norm of at most `max_norm`; 0.0 turns clipping off."""
    replace(optimizer, "clip_grad", max_norm)


# Reduce the gradients that DeepSpeed omits at stage 1 when reduction overlaps the backward pass
#
# With `overlap_comm`, `reduce_gradients` of DeepSpeed 0.19.8 assumes that hooks have reduced every gradient during the
# last backward pass of a window. But hooks do not reduce gradients that only an earlier pass produced, and they reduce
# none at all if DeepSpeed was not told that the pass is the last. The optimizer would then use local gradients, without
# an error.


def overlaps(optimizer: Any) -> bool:
    """Return whether `optimizer`, of stage 1 or 2, reduces gradients during the backward pass."""
    return bool(optimizer.overlap_comm)


def reduce_skipped_by_hooks(optimizer: Any) -> None:
    """Make `optimizer` reduce the gradients that hooks have not reduced, at the end of each window.

    Args:
        optimizer: a `deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer` of stage 1 with `overlap_comm`.
    """
    plain = optimizer.reduce_gradients

    def reduce_gradients(pipeline_parallel: bool = False) -> None:
        _reduce_rest(optimizer)
        plain(pipeline_parallel)

    optimizer.reduce_gradients = reduce_gradients


def _reduce_rest(optimizer: Any) -> None:
    optimizer.setup_buckets()
    waiting = {parameter for bucket in optimizer.ipg_buckets.values() for _, _, parameter in bucket.params}
    for group, parameters in enumerate(optimizer.bit16_groups):
        for parameter in parameters:
            number = optimizer.get_param_id(parameter)
            is_taken = optimizer.params_already_reduced[number] or number in waiting
            if not is_taken and optimizer.get_gradient_for_reduction(parameter) is not None:
                optimizer.reduce_ready_partitions_and_remove_grads(parameter, group)


# The loss scale of an engine


def scale_by(optimizer: Any, scale: Any) -> None:
    """Make DeepSpeed's `optimizer` scale losses with `scale` instead of its own loss scaler.

    Args:
        optimizer: DeepSpeed's optimizer.
        scale: an object with `cur_scale`, `loss_scale`, `dynamic`, `scale_loss(loss)` and `update_scale(overflow)`.
    """
    optimizer.torch_autocast_gradscaler = None
    optimizer.loss_scaler = scale
    optimizer.dynamic_loss_scale = True


# The dtype that DeepSpeed gives to weights


@contextmanager
def keep_given_dtype() -> Iterator[None]:
    """Inside this context, make DeepSpeed use the dtype that it is given."""
    from deepspeed.runtime.zero.partition_parameters import InsertPostInitMethodToModuleSubClasses as Patches

    choose = Patches._set_dtype

    def set_dtype(self: Any, ds_config: Any, dtype: torch.dtype | None) -> None:
        choose(self, ds_config, dtype)
        if dtype is not None:
            self.dtype = dtype

    Patches._set_dtype = set_dtype
    try:
        yield
    finally:
        Patches._set_dtype = choose


# Gradients that stages 1 and 2 with offload copy to host memory


def wait_for_copies(optimizer: Any) -> None:
    """Wait until the gradients of a stage-1 or stage-2 `optimizer` are in host memory, if it is offloaded."""
    optimizer._wait_for_offload_copies()


def discard_offloaded_gradients(optimizer: Any) -> None:
    """Discard the gradients of a stage-1 or stage-2 `optimizer` with offload, including those being copied."""
    optimizer._wait_for_offload_copies()
    optimizer._offload_accumulated_param_ids = set()
    for partition in optimizer.single_partition_of_fp32_groups:
        partition.grad.zero_()


def zero_gradient_on_host(optimizer: Any, parameter: Any) -> None:
    """Zero the gradient of `parameter` that a stage-1 or stage-2 `optimizer` with offload has in host memory."""
    number = optimizer.get_param_id(parameter)
    optimizer._wait_for_offload_copies()
    position = optimizer.grad_position.get(number)
    if position is not None:  # otherwise another rank has the gradient
        group, _, start, numel = position
        optimizer.single_partition_of_fp32_groups[group].grad.narrow(0, start, numel).zero_()
    accumulated = optimizer.accumulated_grads_in_cpu.get(number)
    if accumulated is not None:
        accumulated.zero_()
