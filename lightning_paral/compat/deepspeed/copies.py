"""Gradients on their way to the host, where stages 1 and 2 with offload keep them."""

from typing import Any

from lightning_paral.compat.private_name import PrivateName

_STAGE2 = "deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer"

NAMES = (
    PrivateName(
        name=f"{_STAGE2}._wait_for_offload_copies",
        purpose="to read or change gradients on the host only once they have arrived",
        reason="copies to pinned memory are asynchronous, and nothing public waits for them before the step does",
        seen="deepspeed 0.19.8",
        parameters=("self",),
    ),
    PrivateName(
        name=f"{_STAGE2}._offload_accumulated_param_ids",
        purpose="to forget a window whose step does not come",
        reason="only step empties it: the next window would take in gradients of this one",
        seen="deepspeed 0.19.8",
        on_instances=True,
    ),
    PrivateName(
        name=f"{_STAGE2}.grad_position",
        purpose="to set to zero what is on the host of an earlier window where no new gradient came",
        reason="safe_set_full_grad makes a tensor of the parameter's size on the device first",
        seen="deepspeed 0.19.8",
        on_instances=True,
    ),
)


def wait_for_copies(optimizer: Any) -> None:
    """Wait until gradients of `optimizer`, of stage 1 or 2, have arrived on the host; at once without offload."""
    optimizer._wait_for_offload_copies()


def forget_copies(optimizer: Any) -> None:
    """Let `optimizer`, of stage 1 or 2 with offload, forget gradients that are on the host or on their way there."""
    optimizer._wait_for_offload_copies()
    optimizer._offload_accumulated_param_ids = set()
    for partition in optimizer.single_partition_of_fp32_groups:
        partition.grad.zero_()


def zero_gradient_on_host(optimizer: Any, parameter: Any) -> None:
    """Set to zero what `optimizer`, of stage 1 or 2 with offload, keeps of the gradient of `parameter`."""
    place = optimizer.grad_position.get(optimizer.get_param_id(parameter))
    if place is not None:  # else it is another rank's
        group, _, start, numel = place
        optimizer.single_partition_of_fp32_groups[group].grad.narrow(0, start, numel).zero_()
