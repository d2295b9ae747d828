"""Backward passes through several engines: what `engine.backward` does before and after the pass of one."""

from collections.abc import Iterable
from typing import Any

from lightning_paral.compat.private_name import PrivateName

_ENGINE = "deepspeed.runtime.engine.DeepSpeedEngine"
_REASON = (
    "engine.backward runs the pass of one engine, and with loss.backward() hooks reduce gradients in an order that can "
    "differ between ranks if a loss does not reach all engines"
)

NAMES = (
    PrivateName(
        name=f"{_ENGINE}._running_engine_backward",
        purpose="to keep an engine from ending a backward pass on its own",
        reason=_REASON,
        seen="deepspeed 0.19.8",
        upstream="https://github.com/deepspeedai/DeepSpeed/pull/7018",
        on_instances=True,
    ),
    PrivateName(
        name=f"{_ENGINE}._backward_epilogue",
        purpose="to reduce an engine's gradients after a shared backward pass",
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
            purpose="to end an accumulation window after its last backward pass",
            reason="the engine has to be told before the last pass",
            seen="deepspeed 0.19.8",
        )
        for owner in ("stage_1_and_2.DeepSpeedZeroOptimizer", "stage3.DeepSpeedZeroOptimizer_Stage3")
    ),
    PrivateName(
        name="deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3._offload_boundary_param_ids",
        purpose="to hand over gradients with offload that an accumulation window's last backward pass did not reach",
        reason="DeepSpeed hands over those of a last pass that is announced, or those of the whole window again",
        seen="deepspeed 0.19.8",
        on_instances=True,
    ),
)


def begin_pass(optimizer: Any) -> None:
    """Announce a backward pass: `engine.forward` does so as well, but several passes may follow one forward."""
    optimizer.clear_backward_seen_flag()


def begin_shared_pass(engine: Any) -> None:
    """Announce a backward pass that may reach this engine's parameters."""
    begin_pass(engine.optimizer)
    engine.optimizer.backward_prologue()
    engine.optimizer.enter_backward()
    engine._running_engine_backward = True


def end_window(optimizer: Any) -> None:
    """End the accumulation window, at stages 2 and 3: no backward pass follows before the step. *Collective*."""
    optimizer.finalize_gradient_accumulation_boundary()


def end_window_for(optimizer: Any, stage: int, parameters: Iterable[Any]) -> None:
    """End the window, at stages 2 and 3 with offload, for parameters that its announced last pass did not reach.

    In that pass DeepSpeed hands over to the optimizer only the gradients that it reduces.
    """
    if stage == 3:
        name, missed = "_offload_boundary_param_ids", {parameter.ds_id for parameter in parameters}
    else:
        name, missed = "_offload_accumulated_param_ids", {optimizer.get_param_id(each) for each in parameters}
    all_ids = getattr(optimizer, name)
    setattr(optimizer, name, all_ids & missed)
    optimizer.finalize_gradient_accumulation_boundary()
    setattr(optimizer, name, all_ids)


def end_shared_pass(engine: Any) -> None:
    """Let the engine end backward passes on its own again."""
    engine._running_engine_backward = False


def end_unreached_pass(engine: Any) -> None:
    """End a backward pass that reached none of this engine's parameters."""
    engine.optimizer.exit_backward()


def end_reached_pass(engine: Any) -> None:
    """Reduce the gradients of an engine that the backward pass reached. *Collective* over the world."""
    engine._backward_epilogue()
