"""Gradients on their way to the host, where stages 1 and 2 with offload keep them."""

from typing import Any

from lightning_paral.compat.private_name import PrivateName

_STAGE2 = "deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer"

NAMES = (
    PrivateName(
        name=f"{_STAGE2}._wait_for_offload_copies",
        purpose="to read or change gradients on the host only once they have arrived",
        reason="copies to pinned memory are asynchronous, and no public function waits for them before the step",
        seen="deepspeed 0.19.8",
        parameters=("self",),
    ),
    PrivateName(
        name=f"{_STAGE2}._offload_accumulated_param_ids",
        purpose="to discard the gradients of a window that ends without a step",
        reason="only step empties it, so the next window would include these gradients",
        seen="deepspeed 0.19.8",
        on_instances=True,
    ),
    PrivateName(
        name=f"{_STAGE2}.accumulated_grads_in_cpu",
        purpose="to zero the sum of an earlier window's gradients if the parameter got none so far in this one",
        reason="DeepSpeed adds to the sum from the second backward pass of a window on, to whatever it holds",
        seen="deepspeed 0.19.8",
        on_instances=True,
    ),
    PrivateName(
        name=f"{_STAGE2}.grad_position",
        purpose="to zero gradients of an earlier window on the host if the parameter got no new one",
        reason="safe_set_full_grad allocates a tensor of the parameter's size on the device",
        seen="deepspeed 0.19.8",
        on_instances=True,
    ),
)


def wait_for_copies(optimizer: Any) -> None:
    """Wait until the gradients of a stage-1 or stage-2 `optimizer` are on the host; return at once without offload."""
    optimizer._wait_for_offload_copies()


def discard_offloaded_gradients(optimizer: Any) -> None:
    """Discard gradients on the host, or being copied there, of a stage-1 or stage-2 `optimizer` with offload."""
    optimizer._wait_for_offload_copies()
    optimizer._offload_accumulated_param_ids = set()
    for partition in optimizer.single_partition_of_fp32_groups:
        partition.grad.zero_()


def zero_gradient_on_host(optimizer: Any, parameter: Any) -> None:
    """Zero what a stage-1 or stage-2 `optimizer` with offload keeps of the gradient of `parameter`."""
    number = optimizer.get_param_id(parameter)
    optimizer._wait_for_offload_copies()
    place = optimizer.grad_position.get(number)
    if place is not None:  # else another rank has it
        group, _, start, numel = place
        optimizer.single_partition_of_fp32_groups[group].grad.narrow(0, start, numel).zero_()
    accumulated = optimizer.accumulated_grads_in_cpu.get(number)
    if accumulated is not None:
        accumulated.zero_()
