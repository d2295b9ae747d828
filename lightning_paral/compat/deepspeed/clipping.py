"""The norm to which DeepSpeed's optimizers clip gradients in a step."""

from typing import Any

from lightning_paral.compat.private_name import Names, replace

NAMES: Names = {
    "deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer": {
        ".clip_grad": "clip gradients by the norm that Lightning passes for each step",
    },
    "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3": {
        ".clip_grad": "clip gradients by the norm that Lightning passes for each step",
    },
}


def clip_next_step(optimizer: Any, max_norm: float) -> None:
    """Make the next step clip gradients to a global 2-norm of at most `max_norm`; 0.0 turns clipping off."""
    replace(optimizer, "clip_grad", max_norm)
