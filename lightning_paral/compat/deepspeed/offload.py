"""The attributes that tell whether one of DeepSpeed's optimizers runs on the host."""

from typing import Any

from lightning_paral.compat.private_name import PrivateName

NAMES = tuple(
    PrivateName(
        name=f"deepspeed.runtime.zero.{name}",
        purpose="to find gradients where DeepSpeed keeps them",
        reason="the configuration gives the offload that was requested, but not that of each optimizer",
        seen="deepspeed 0.19.8",
        on_instances=True,
    )
    for name in (
        "stage_1_and_2.DeepSpeedZeroOptimizer.cpu_offload",
        "stage3.DeepSpeedZeroOptimizer_Stage3.offload_optimizer",
    )
)


def is_offloaded(optimizer: Any, stage: int) -> bool:
    """Return whether `optimizer`, of ZeRO's `stage`, runs on the host."""
    return bool(optimizer.offload_optimizer if stage == 3 else optimizer.cpu_offload)
