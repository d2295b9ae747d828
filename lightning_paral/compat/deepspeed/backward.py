"""Backward passes that reach the parameters of several engines: what `engine.backward` does before and after one."""

from typing import Any

from lightning_paral.compat.private_name import PrivateName

_ENGINE = "deepspeed.runtime.engine.DeepSpeedEngine"
_REASON = (
    "engine.backward runs one engine's pass, and hooks for loss.backward() reduce gradients in an order that ranks "
    "need not share where a loss does not reach all engines"
)

NAMES = (
    PrivateName(
        name=f"{_ENGINE}._running_engine_backward",
        purpose="to keep an engine from ending a backward pass by itself",
        reason=_REASON,
        seen="deepspeed 0.19.8",
        upstream="https://github.com/deepspeedai/DeepSpeed/pull/7018",
        on_instances=True,
    ),
    PrivateName(
        name=f"{_ENGINE}._backward_epilogue",
        purpose="to reduce an engine's gradients after a backward pass that has reached them",
        reason=_REASON,
        seen="deepspeed 0.19.8",
        upstream="https://github.com/deepspeedai/DeepSpeed/pull/7018",
        parameters=("self",),
    ),
    *(
        PrivateName(
            name=f"deepspeed.runtime.base_optimizer.ZeROOptimizer.{name}",
            purpose="to begin and end a backward pass that several engines share",
            reason=_REASON,
            seen="deepspeed 0.19.8",
        )
        for name in ("clear_backward_seen_flag", "backward_prologue", "enter_backward", "exit_backward")
    ),
    *(
        PrivateName(
            name=f"deepspeed.runtime.zero.{owner}.finalize_gradient_accumulation_boundary",
            purpose="to end a window of backward passes that turns out to have been complete",
            reason="the engine wants to know before the last pass",
            seen="deepspeed 0.19.8",
        )
        for owner in ("stage_1_and_2.DeepSpeedZeroOptimizer", "stage3.DeepSpeedZeroOptimizer_Stage3")
    ),
)


def begin_pass(optimizer: Any) -> None:
    """Count a backward pass: `engine.forward` does it, too, but several passes may follow one forward."""
    optimizer.clear_backward_seen_flag()


def begin_shared_pass(engine: Any) -> None:
    """Say that a backward pass follows that may reach this engine's parameters."""
    begin_pass(engine.optimizer)
    engine.optimizer.backward_prologue()
    engine.optimizer.enter_backward()
    engine._running_engine_backward = True


def end_window(optimizer: Any) -> None:
    """Take the backward passes since the last step for all there will be, at stages 2 and 3. *Collective*."""
    optimizer.finalize_gradient_accumulation_boundary()


def end_shared_pass(engine: Any) -> None:
    """Let the engine's own hooks end backward passes again."""
    engine._running_engine_backward = False


def leave_unreached(engine: Any) -> None:
    """Say that the backward pass reached none of this engine's parameters."""
    engine.optimizer.exit_backward()


def reduce_reached(engine: Any) -> None:
    """Reduce this engine's gradients, which the backward pass has reached. *Collective* over the world."""
    engine._backward_epilogue()
