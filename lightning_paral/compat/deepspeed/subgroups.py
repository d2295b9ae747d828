"""Sub-groups of stage 3: flat fp32 weights of several parameters and their optimizer state, possibly on NVMe."""

from typing import Any

from torch import Tensor

from lightning_paral.compat.private_name import Names

NAMES: Names = {
    "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3": {
        ".fp16_groups": "read and write this rank's fp32 weights and their states",
        ".fp32_partitioned_groups_flat": "read and write this rank's fp32 weights and their states",
        ".grad_position": "read and write this rank's fp32 weights and their states",
        ".subgroup_to_device": "read and write this rank's fp32 weights and their states",
        ".backup_optimizer": "read and write this rank's fp32 weights and their states",
        "_reassign_or_swap_out_partitioned_parameters": "make forward use weights that have been written",
        "_swappable_optimizer_subgroup(sub_group_id)": "hold a sub-group in memory while it is read",
        "_optimizer_states_and_gradient_swap_in(sub_group_id)": "hold a sub-group in memory while it is read",
        "_optimizer_states_and_gradient_swap_out(sub_group_id)": "hold a sub-group in memory while it is read",
        "_release_swap_buffers(sub_group_id)": "hold a sub-group in memory while it is read",
    },
}


def flat_weights(optimizer: Any, index: int) -> Tensor:
    """Return the flat fp32 weights of a sub-group. The tensor is empty while they are on NVMe."""
    flat: Tensor = optimizer.fp32_partitioned_groups_flat[index]
    return flat


def stepping_optimizer(optimizer: Any, index: int) -> Any:
    """Return the optimizer that updates a sub-group: a different one if the sub-group is not offloaded."""
    on_device = optimizer.offload_optimizer and optimizer.subgroup_to_device[index] != "cpu"
    return optimizer.backup_optimizer if on_device else optimizer.optimizer


def position_of(optimizer: Any, parameter: Any) -> tuple[int, int]:
    """Return the offset of this rank's shard of `parameter` in its sub-group, and its length with padding."""
    _, offset, length = optimizer.grad_position[optimizer.get_param_id(parameter)]
    return offset, length


def copy_flat_weights_to_parameters(optimizer: Any, index: int) -> None:
    """Copy the flat fp32 weights of a sub-group to its parameters."""
    optimizer._reassign_or_swap_out_partitioned_parameters(index)


def shares_memory_with_parameters(optimizer: Any, index: int) -> bool:
    """Return whether the flat fp32 weights of a sub-group are in the memory of the parameters' own shards."""
    own = optimizer.fp16_partitioned_groups_flat[index]
    return own is not None and own.numel() > 0 and own.data_ptr() == flat_weights(optimizer, index).data_ptr()


def is_on_nvme(optimizer: Any, index: int) -> bool:
    """Return whether the fp32 weights and state of a sub-group are on NVMe between steps."""
    return bool(optimizer._swappable_optimizer_subgroup(index))


def swap_in(optimizer: Any, index: int) -> None:
    """Read a sub-group from NVMe: its weights and all of its state."""
    optimizer._optimizer_states_and_gradient_swap_in(index)


def swap_out(optimizer: Any, index: int) -> None:
    """Write a sub-group back to NVMe, and free its memory."""
    optimizer._optimizer_states_and_gradient_swap_out(index)


def release_buffers(optimizer: Any, index: int) -> None:
    """Free the memory of a sub-group without writing it back."""
    optimizer._release_swap_buffers(index)
