"""What Lightning's training loop tells about a step: the actions that it profiles, and the step of its loggers."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any, TypeVar

from lightning.pytorch import Trainer

from lightning_paral.compat.lightning.methods import shadow_method
from lightning_paral.compat.private_name import PrivateName

T = TypeVar("T")

_SEEN = "lightning 2.6.1 to 2.6.6"
_SIGTERM = PrivateName(
    name="lightning.pytorch.loops._TrainingEpochLoop._broadcast_sigterm_tensor",
    purpose="to measure how long ranks wait for rank 0 before each batch",
    reason="the collective is called by the loop itself, and no public hook runs around it",
    seen=_SEEN,
    parameters=("self",),
)
NAMES = (
    _SIGTERM,
    PrivateName(
        name="lightning.pytorch.loops._TrainingEpochLoop._batches_that_stepped",
        on_instances=True,
        purpose="to log values with the same step as Lightning does",
        reason="trainer.global_step counts the steps of each optimizer, and loggers get this number",
        seen=_SEEN,
    ),
)


def step_of_loggers(trainer: Trainer) -> int:
    """Return the step with which Lightning logs values in a training batch."""
    step: int = trainer.fit_loop.epoch_loop._batches_that_stepped
    return step


def actions_of_step(trainer: Trainer, *, data: T, forward: T, backward: T, optimizer: T) -> dict[str, T]:
    """Return the names of the actions that Lightning profiles in a training step, with a label for each.

    The action of the optimizer includes those of the forward and backward pass in automatic optimization. In manual
    optimization, that of the forward pass includes that of the optimizer, and the backward pass has none.

    Args:
        trainer: the Trainer of a fit that has started.
        data: a label for loading a batch, and for moving it to the device.
        forward: a label for `training_step`.
        backward: a label for the backward pass.
        optimizer: a label for the optimizer's step, with clipping.
    """
    strategy, module = type(trainer.strategy).__name__, type(trainer.lightning_module).__name__
    return {
        f"[{type(trainer.fit_loop.epoch_loop).__name__}].train_dataloader_next": data,
        f"[Strategy]{strategy}.batch_to_device": data,
        f"[Strategy]{strategy}.training_step": forward,
        f"[Strategy]{strategy}.backward": backward,
        f"[LightningModule]{module}.optimizer_step": optimizer,
        "optimizer_step": optimizer,
    }


def follow_profiler(
    trainer: Trainer, labels: Mapping[str, T], begin: Callable[[T], None], end: Callable[[T], None], undo: ExitStack
) -> None:
    """Call functions whenever the Trainer's profiler starts and stops some actions, until `undo` is closed.

    The profiler works as before. Every Trainer has one; without the user's, it does nothing.

    Args:
        trainer: the Trainer.
        labels: the names of the actions, with a label for each.
        begin: called with the label of the action before the profiler starts it.
        end: called with the label of the action after the profiler has stopped it.
        undo: a stack; closing it ends the calls.
    """
    profiler: Any = trainer.profiler  # type: ignore[attr-defined]
    start, stop, label_of = profiler.start, profiler.stop, labels.get

    def start_action(action_name: str) -> None:
        label = label_of(action_name)
        if label is not None:
            begin(label)
        start(action_name)

    def stop_action(action_name: str) -> None:
        stop(action_name)
        label = label_of(action_name)
        if label is not None:
            end(label)

    shadow_method(profiler, "start", start_action, undo)
    shadow_method(profiler, "stop", stop_action, undo)


def around_broadcast_before_batch(
    trainer: Trainer, begin: Callable[[], None], end: Callable[[], None], undo: ExitStack
) -> None:
    """Call functions around the broadcast of rank 0 that the loop does before each batch, until `undo` is closed."""
    _SIGTERM.resolve()
    loop: Any = trainer.fit_loop.epoch_loop
    broadcast = loop._broadcast_sigterm_tensor

    def broadcast_sigterm_tensor() -> None:
        begin()
        try:
            broadcast()
        finally:
            end()

    shadow_method(loop, "_broadcast_sigterm_tensor", broadcast_sigterm_tensor, undo)
