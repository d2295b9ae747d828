"""The norm to which DeepSpeed's optimizers clip gradients in a step."""

from typing import Any

from lightning_paral.compat.private_name import PrivateName

_STAGE2, _STAGE3 = NAMES = tuple(
    PrivateName(
        name=f"deepspeed.runtime.zero.{owner}.clip_grad",
        purpose="to clip gradients by the norm that Lightning passes for each step",
        reason="the public option, gradient_clipping, cannot be changed after the engine has been created",
        seen="deepspeed 0.19.8",
        on_instances=True,
    )
    for owner in ("stage_1_and_2.DeepSpeedZeroOptimizer", "stage3.DeepSpeedZeroOptimizer_Stage3")
)


def clip_next_step(optimizer: Any, max_norm: float, stage: int) -> None:
    """Make the next step clip gradients to a global 2-norm of at most `max_norm`; 0.0 turns clipping off."""
    (_STAGE3 if stage == 3 else _STAGE2).replace_on(optimizer, max_norm)
