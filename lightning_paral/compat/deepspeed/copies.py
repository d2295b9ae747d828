"""Gradients that stages 1 and 2 with offload copy to host memory."""

from typing import Any

from lightning_paral.compat.private_name import Names

NAMES: Names = {
    "deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer": {
        "_wait_for_offload_copies": "read or change gradients in host memory only after they have been copied there",
        "._offload_accumulated_param_ids": "discard the gradients of a window that ends without a step",
        ".accumulated_grads_in_cpu": "zero the sum of an earlier window if there is no gradient yet",
        ".grad_position": "zero a gradient of an earlier window in host memory if the parameter has no new one",
    },
}


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
