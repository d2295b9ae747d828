"""The norm to which the steps of DeepSpeed's optimizers clip gradients."""

from typing import Any

from lightning_paral.compat.private_name import PrivateName

_STAGE2, _STAGE3 = NAMES = tuple(
    PrivateName(
        name=f"deepspeed.runtime.zero.{owner}.clip_grad",
        purpose="to clip gradients by the norm that Lightning passes for each step",
        reason="the public option, gradient_clipping, is fixed when the engine is made",
        seen="deepspeed 0.19.8",
        on_instances=True,
    )
    for owner in ("stage_1_and_2.DeepSpeedZeroOptimizer", "stage3.DeepSpeedZeroOptimizer_Stage3")
)


def clip_next_step(optimizer: Any, max_norm: float, stage: int) -> None:
    """Let the next step scale gradients so that their global 2-norm is at most `max_norm`; 0.0 leaves them."""
    (_STAGE3 if stage == 3 else _STAGE2).replace_on(optimizer, max_norm)
