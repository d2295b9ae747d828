"""The attributes that tell whether one of DeepSpeed's optimizers runs on the host."""

from typing import Any

from lightning_paral.compat.private_name import Names

NAMES: Names = {
    "deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer": {
        ".cpu_offload": "find gradients where DeepSpeed keeps them",
    },
    "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3": {
        ".offload_optimizer": "find gradients where DeepSpeed keeps them",
    },
}


def is_offloaded(optimizer: Any, stage: int) -> bool:
    """Return whether `optimizer`, of ZeRO's `stage`, runs on the host."""
    return bool(optimizer.offload_optimizer if stage == 3 else optimizer.cpu_offload)
