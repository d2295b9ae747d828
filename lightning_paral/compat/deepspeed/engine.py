"""DeepSpeed's engine: backward passes, gradients and their norms, loss scale and dtype."""

from typing import Any

import torch
from torch import Tensor

from lightning_paral.compat.private_name import Names, replace

NAMES: Names = {
    "deepspeed.runtime.base_optimizer.ZeROOptimizer": {
        "clear_backward_seen_flag": "begin a further backward pass after the same forward pass",
    },
    "deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer": {
        "finalize_gradient_accumulation_boundary": "end an accumulation window after its last backward pass",
        "scaled_global_norm": "read the norm of gradients before the step that clips them",
        ".clip_grad": "clip gradients by the norm that Lightning passes for each step",
        ".torch_autocast_gradscaler": "scale losses as torch.amp.GradScaler does",
        ".loss_scaler": "scale losses as torch.amp.GradScaler does",
        ".dynamic_loss_scale": "scale losses as torch.amp.GradScaler does",
        "loss_scale": "know the scale of losses and gradients",
        "_wait_for_offload_copies": "read gradients in host memory only after they have been copied there",
    },
    "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3": {
        ".clip_grad": "clip gradients by the norm that Lightning passes for each step",
        ".loss_scaler": "scale losses as torch.amp.GradScaler does",
        "_get_norm_groups": "read the norm of gradients before the step that clips them",
    },
}


# Backward passes and gradients


def begin_pass(optimizer: Any) -> None:
    """Tell `optimizer` that a backward pass begins. `engine.forward` does so only for the first pass after it."""
    optimizer.clear_backward_seen_flag()


def end_window(optimizer: Any) -> None:
    """End the accumulation window at stage 2 or 3, after the last backward pass before a step. *Collective*."""
    optimizer.finalize_gradient_accumulation_boundary()


def wait_for_copies(optimizer: Any) -> None:
    """Wait until the gradients of a stage-1 or stage-2 `optimizer` are in host memory, if it is offloaded."""
    optimizer._wait_for_offload_copies()


def scaled_norm(optimizer: Any, stage: int) -> Tensor:
    """Return the global 2-norm of the averaged gradients, in fp32 and multiplied by the loss scale. *Collective*."""
    if stage < 3:
        return torch.as_tensor(optimizer.scaled_global_norm()).float()
    squares = torch.stack([norm.float() ** 2 for norm in optimizer._get_norm_groups()])
    return squares.sum().sqrt()


def clip_next_step(optimizer: Any, max_norm: float) -> None:
    """Make the next step clip gradients to a global 2-norm of at most `max_norm`; 0.0 turns clipping off."""
    replace(optimizer, "clip_grad", max_norm)


def scale_by(optimizer: Any, scale: Any) -> None:
    """Make DeepSpeed's `optimizer` scale losses with `scale` instead of its own loss scaler.

    Args:
        optimizer: DeepSpeed's optimizer.
        scale: an object with `cur_scale`, `loss_scale`, `dynamic`, `scale_loss(loss)` and `update_scale(overflow)`.
    """
    optimizer.torch_autocast_gradscaler = None
    optimizer.loss_scaler = scale
    optimizer.dynamic_loss_scale = True
