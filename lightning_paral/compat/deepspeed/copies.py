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
