"""The loss scale of an engine."""

from typing import Any

from lightning_paral.compat.private_name import PrivateName

_REASON = (
    "under fp16 autocast, DeepSpeed's own scaler clips gradients before it unscales them, never lowers the scale, and "
    "uses a raised scale to unscale gradients that have the old scale; no option turns it off"
)

_OPTIMIZERS = ("stage_1_and_2.DeepSpeedZeroOptimizer", "stage3.DeepSpeedZeroOptimizer_Stage3")

NAMES = (
    *(
        PrivateName(
            name=f"deepspeed.runtime.zero.{owner}.{name}",
            purpose="to scale losses as torch.amp.GradScaler does",
            reason=_REASON,
            seen="deepspeed 0.19.8",
            on_instances=True,
        )
        for owner in _OPTIMIZERS
        for name in ("torch_autocast_gradscaler", "loss_scaler", "dynamic_loss_scale")
    ),
    *(
        PrivateName(
            name=f"deepspeed.runtime.{name}",
            purpose="to know the scale of losses and gradients",
            reason="the engine's public functions scale a loss, but do not return the current scale",
            seen="deepspeed 0.19.8",
        )
        for name in (
            "base_optimizer.ZeROOptimizer.needs_scaler",
            *(f"zero.{owner}.loss_scale" for owner in _OPTIMIZERS),
        )
    ),
)


def scale_by(optimizer: Any, scale: Any) -> None:
    """Make DeepSpeed's `optimizer` scale losses with `scale` instead of its own loss scaler.

    Args:
        optimizer: DeepSpeed's optimizer.
        scale: an object with `cur_scale`, `loss_scale`, `dynamic`, `scale_loss(loss)` and `update_scale(overflow)`.
    """
    optimizer.torch_autocast_gradscaler = None
    optimizer.loss_scaler = scale
    optimizer.dynamic_loss_scale = True
