"""Parts of `engine.backward`, for backward passes that several engines share."""

from collections.abc import Iterable
from typing import Any

from lightning_paral.compat.private_name import PrivateName

_ENGINE = "deepspeed.runtime.engine.DeepSpeedEngine"
_REASON = (
    "engine.backward runs a pass for one engine, and loss.backward() makes hooks reduce gradients in an order that can "
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
            reason="engine.set_gradient_accumulation_boundary must be called before the last pass",
            seen="deepspeed 0.19.8",
        )
        for owner in ("stage_1_and_2.DeepSpeedZeroOptimizer", "stage3.DeepSpeedZeroOptimizer_Stage3")
    ),
    PrivateName(
        name="deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3._offload_boundary_param_ids",
        purpose="to pass the optimizer the offloaded gradients that a window's last backward pass did not produce",
        reason="DeepSpeed passes either those of the last pass only, or those of the whole window a second time",
        seen="deepspeed 0.19.8",
        on_instances=True,
    ),
)


def begin_pass(optimizer: Any) -> None:
    """Tell `optimizer` that a backward pass begins. `engine.forward` does so only for the first pass after it."""
    optimizer.clear_backward_seen_flag()


def begin_shared_pass(engine: Any) -> None:
    """Tell the engine that a shared backward pass begins, which may reach its parameters."""
    begin_pass(engine.optimizer)
    engine.optimizer.backward_prologue()
    engine.optimizer.enter_backward()
    engine._running_engine_backward = True


def end_window(optimizer: Any) -> None:
    """End the accumulation window at stage 2 or 3, after the last backward pass before a step. *Collective*."""
    optimizer.finalize_gradient_accumulation_boundary()


def end_window_for(optimizer: Any, stage: int, parameters: Iterable[Any]) -> None:
    """Pass the offloaded gradients of `parameters` to the optimizer at the end of a window, at stage 2 or 3.

    In the last backward pass of a window, DeepSpeed passes only the gradients of parameters that this pass reaches;
    `parameters` are the others.
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
    """Make the engine end backward passes on its own again."""
    engine._running_engine_backward = False


def end_unreached_pass(engine: Any) -> None:
    """End a backward pass that reached none of this engine's parameters."""
    engine.optimizer.exit_backward()


def end_reached_pass(engine: Any) -> None:
    """End a backward pass that reached this engine's parameters; reduce gradients. *Collective* over the world."""
    engine._backward_epilogue()
