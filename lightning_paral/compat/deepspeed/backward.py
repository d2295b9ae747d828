"""Parts of `engine.backward`, for backward passes that several engines share."""

from collections.abc import Iterable
from typing import Any

from lightning_paral.compat.private_name import Names

NAMES: Names = {
    "deepspeed.runtime.engine.DeepSpeedEngine": {
        "._running_engine_backward": "keep an engine from ending a backward pass on its own (deepspeed#7018)",
        "_backward_epilogue": "reduce an engine's gradients after a shared backward pass (deepspeed#7018)",
    },
    "deepspeed.runtime.base_optimizer.ZeROOptimizer": {
        "clear_backward_seen_flag": "begin and end a backward pass that several engines share",
        "backward_prologue": "begin and end a backward pass that several engines share",
        "enter_backward": "begin and end a backward pass that several engines share",
        "exit_backward": "begin and end a backward pass that several engines share",
    },
    "deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer": {
        "finalize_gradient_accumulation_boundary": "end an accumulation window after its last backward pass",
    },
    "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3": {
        "finalize_gradient_accumulation_boundary": "end an accumulation window after its last backward pass",
        "._offload_boundary_param_ids": "pass on offloaded gradients that a window's last backward pass did not make",
    },
}


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
