"""The loss scale of an engine."""

from typing import Any

from lightning_paral.compat.private_name import Names

NAMES: Names = {
    "deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer": {
        ".torch_autocast_gradscaler": "scale losses as torch.amp.GradScaler does",
        ".loss_scaler": "scale losses as torch.amp.GradScaler does",
        ".dynamic_loss_scale": "scale losses as torch.amp.GradScaler does",
        "loss_scale": "know the scale of losses and gradients",
    },
    "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3": {
        ".torch_autocast_gradscaler": "scale losses as torch.amp.GradScaler does",
        ".loss_scaler": "scale losses as torch.amp.GradScaler does",
        ".dynamic_loss_scale": "scale losses as torch.amp.GradScaler does",
        "loss_scale": "know the scale of losses and gradients",
    },
    "deepspeed.runtime.base_optimizer.ZeROOptimizer": {"needs_scaler": "know the scale of losses and gradients"},
}


def scale_by(optimizer: Any, scale: Any) -> None:
    """Make DeepSpeed's `optimizer` scale losses with `scale` instead of its own loss scaler.

    Args:
        optimizer: DeepSpeed's optimizer.
        scale: an object with `cur_scale`, `loss_scale`, `dynamic`, `scale_loss(loss)` and `update_scale(overflow)`.
    """
    optimizer.torch_autocast_gradscaler = None
    optimizer.loss_scaler = scale
    optimizer.dynamic_loss_scale = True
