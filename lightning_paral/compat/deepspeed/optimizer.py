"""DeepSpeed's optimizers: backward passes, gradients and their norms, loss scale, fp32 masters and sub-groups."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_paral.compat.private_name import Names

NAMES: Names = {
    "deepspeed.runtime.base_optimizer.ZeROOptimizer": {
        "clear_backward_seen_flag": "begin a further backward pass after the same forward pass",
    },
    "deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer": {
        "finalize_gradient_accumulation_boundary": "end an accumulation window after its last backward pass",
        "scaled_global_norm": "read the norm of gradients before the step that clips them",
        ".clip_grad": "clip gradients by the norm that Lightning passes for each step",
        "loss_scale": "know the scale of losses and gradients",
        "_link_all_hp_params": "link parameters to their masters again after the optimizer's groups have changed",
        ".bit16_groups": "know which parameters share a flat master",
        ".single_partition_of_fp32_groups": "read and write this rank's flat masters without a collective",
        ".parallel_partitioned_bit16_groups": "share the memory of fp32 weights, and gather averages of weights",
        ".real_dp_process_group": "share the memory of fp32 weights, and gather averages of weights",
    },
    "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3": {
        ".clip_grad": "clip gradients by the norm that Lightning passes for each step",
        "_get_norm_groups": "read the norm of gradients before the step that clips them",
        ".fp16_partitioned_groups_flat": "let fp32 masters share the memory of fp32 weights",
        ".fp16_groups": "read and write this rank's fp32 weights and their states",
        ".fp32_partitioned_groups_flat": "read and write this rank's fp32 weights and their states",
        "_reassign_or_swap_out_partitioned_parameters": "make forward use weights that have been written",
        "_swappable_optimizer_subgroup(sub_group_id)": "hold a sub-group in memory while it is read",
        "_optimizer_states_and_gradient_swap_in(sub_group_id)": "hold a sub-group in memory while it is read",
        "_optimizer_states_and_gradient_swap_out(sub_group_id)": "hold a sub-group in memory while it is read",
        "_release_swap_buffers(sub_group_id)": "hold a sub-group in memory while it is read",
    },
}


# Backward passes and gradients


def begin_pass(optimizer: Any) -> None:
    """Tell `optimizer` that a backward pass begins. `engine.forward` does so only for the first pass after it."""
    optimizer.clear_backward_seen_flag()


def end_window(optimizer: Any) -> None:
    """End the accumulation window at stage 2 or 3, after the last backward pass before a step. *Collective*."""
    optimizer.finalize_gradient_accumulation_boundary()


def scaled_norm(optimizer: Any, stage: int) -> Tensor:
    """Return the global 2-norm of the averaged gradients, in fp32 and multiplied by the loss scale. *Collective*."""
    if stage < 3:
        return torch.as_tensor(optimizer.scaled_global_norm()).float()
    squares = torch.stack([norm.float() ** 2 for norm in optimizer._get_norm_groups()])
    return squares.sum().sqrt()


def clip_next_step(optimizer: Any, max_norm: float) -> None:
    """Make the next step clip gradients to a global 2-norm of at most `max_norm`; 0.0 turns clipping off."""
    optimizer.clip_grad = max_norm


# fp32 master weights, and the flat weights that parameters are views of


def share_masters(optimizer: Any, stage: int) -> None:
    """Let the masters of `optimizer` share the memory of the weights that they are equal to: fp32 weights.

    Saves 4 bytes per element of this rank's shard. DeepSpeed copies masters to weights after a step, which then changes
    nothing. Masters on another device than the weights, and those of an offloaded optimizer, stay apart.
    """
    shared = False
    for master, weights in _masters_and_weights(optimizer, stage):
        kind = (master.dtype, master.device, master.shape)
        if weights is not None and (weights.dtype, weights.device, weights.shape) == kind:
            master.data = weights.detach()
            shared = True
    if shared and stage < 3:
        optimizer._link_all_hp_params()


def _masters_and_weights(optimizer: Any, stage: int) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Yield each flat master, and the flat weights with the same elements; `None` if they are on NVMe."""
    if stage == 3:
        yield from zip(optimizer.fp32_partitioned_groups_flat, optimizer.fp16_partitioned_groups_flat, strict=True)
        return
    for index, master in enumerate(optimizer.single_partition_of_fp32_groups):
        yield master, own_weights(optimizer, index)


def own_weights(optimizer: Any, index: int) -> Tensor:
    """Return this rank's part of the flat weights of a group at stage 1 or 2, of which parameters are views."""
    weights: Tensor = optimizer.parallel_partitioned_bit16_groups[index][
        dist.get_rank(optimizer.real_dp_process_group[index])
    ]
    return weights


def gather_weights(optimizer: Any) -> None:
    """Give every rank of stage 1 or 2 the weights of which another rank has the masters. *Collective*."""
    for shards, group in zip(optimizer.parallel_partitioned_bit16_groups, optimizer.real_dp_process_group, strict=True):
        dist.all_gather(shards, shards[dist.get_rank(group)], group=group)


# Sub-groups of stage 3: flat fp32 weights of several parameters and their optimizer state, possibly on NVMe


def groups_of_parameters(optimizer: Any, stage: int) -> list[list[Any]]:
    """Return the parameters of each flat tensor of fp32 weights: of each group, or of each sub-group at stage 3."""
    groups: list[list[Any]] = optimizer.fp16_groups if stage == 3 else optimizer.bit16_groups
    return groups


def flat_weights(optimizer: Any, stage: int, index: int) -> Tensor:
    """Return flat fp32 weights. The tensor is empty while they are on NVMe."""
    all_flat = optimizer.fp32_partitioned_groups_flat if stage == 3 else optimizer.single_partition_of_fp32_groups
    flat: Tensor = all_flat[index]
    return flat


def copy_flat_weights_to_parameters(optimizer: Any, index: int) -> None:
    """Copy the flat fp32 weights of a sub-group to its parameters."""
    optimizer._reassign_or_swap_out_partitioned_parameters(index)


def shares_memory_with_parameters(optimizer: Any, index: int) -> bool:
    """Return whether the flat fp32 weights of a sub-group are in the memory of the parameters' own shards."""
    own = optimizer.fp16_partitioned_groups_flat[index]
    return own is not None and own.numel() > 0 and own.data_ptr() == flat_weights(optimizer, 3, index).data_ptr()


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
