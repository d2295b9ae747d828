"""Keep track of the last completed optimizer step, to which a checkpoint saved after an exception belongs."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.trainer.states import TrainerFn

from lightning_paral.compat.lightning.precision import call_after_closure
from lightning_paral.compat.lightning.saved_loops import is_at_end_of_epoch, rewind_to_last_step
from lightning_paral.distributed.failures.survivors import StepPosition
from lightning_paral.distributed.rng_state import current_states
from lightning_paral.model.trainer_of import trainer_of
from lightning_paral.strategies.description import StrategyDescription


class StepBoundary(StrategyDescription):
    """Mixin, placed before the Lightning base: know whether an exception came between two optimizer steps, or in one.

    A step is complete from the end of the batch in which the optimizer has changed the weights, to the moment at which
    an optimizer begins to change them again, in a later batch. Forward and backward passes change no weights.
    """

    _ready_at_update: int = 0
    """The number of batches that had been fetched when an optimizer last began to change weights."""
    _keeps_random_states: bool = False
    """Whether a callback may save after an exception, so that random states are kept after each step."""
    _random_states_at_step: dict[str, Any] | None = None
    _undo_tracking: ExitStack | None = None

    def _begin_tracking(self, trainer: Trainer) -> None:
        """Begin to track the steps of a fit, until `_end_tracking`."""
        self._end_tracking()
        self._undo_tracking = ExitStack()
        self._random_states_at_step = None
        self._keeps_random_states = any(map(_may_save_on_exception, vars(trainer)["callbacks"]))
        call_after_closure(self.precision_plugin, self._begin_update, self._undo_tracking)

    def _end_tracking(self) -> None:
        if self._undo_tracking is not None:
            self._undo_tracking.close()
            self._undo_tracking = None

    def _begin_update(self) -> None:
        trainer = trainer_of(self.lightning_module)
        if trainer is not None:
            self._ready_at_update = trainer.fit_loop.epoch_loop.batch_progress.total.ready

    def _keep_random_states(self) -> None:
        if self._keeps_random_states:
            self._random_states_at_step = current_states(self._own_devices)

    def on_train_start(self) -> None:
        """Begin to count batches; see the Lightning base for the rest."""
        super().on_train_start()
        self._begin_update()  # a resumed run starts with gradients of zero

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Run `closure`, the hooks, and the optimizer."""
        result = super().optimizer_step(optimizer, closure, model, **kwargs)
        self._keep_random_states()
        return result

    def on_validation_end(self) -> None:
        """Keep the random states, because a resumed run does not repeat the validation."""
        super().on_validation_end()
        trainer = trainer_of(self.lightning_module)
        if trainer is not None and self._is_fit and self._num_accumulated(trainer) == 0:
            self._keep_random_states()

    def _step_position(self) -> StepPosition:
        """Return this rank's position. Outside of a fit, all ranks have the same."""
        trainer = trainer_of(self.lightning_module)
        if trainer is None or trainer.state.fn != TrainerFn.FITTING:
            return StepPosition()
        batches: Any = trainer.fit_loop.epoch_loop.batch_progress
        epochs: Any = trainer.fit_loop.epoch_progress
        return StepPosition(
            epoch=epochs.current.started,
            batch=batches.current.processed - self._num_accumulated(trainer),
            step=trainer.global_step,
            is_complete=not (_is_in_batch(trainer) and self._ready_at_update == batches.total.ready),
        )

    def _num_accumulated(self, trainer: Trainer) -> int:
        """Return the number of processed batches whose gradients are in no optimizer step."""
        batches: Any = trainer.fit_loop.epoch_loop.batch_progress
        number = batches.total.ready - self._ready_at_update - _is_in_batch(trainer)
        # Without an optimizer there is nothing to repeat. An epoch ends with a step, except in manual optimization.
        return int(min(max(0, number), batches.current.processed)) if self.optimizers else 0

    def _at_last_step(self, checkpoint: dict[str, Any]) -> tuple[dict[str, Any], int]:
        """Return a checkpoint saved after an exception as it was after the last completed step.

        Returns:
            tuple[dict[str, Any], int]: the checkpoint, and the number of batches that it does not count any more.
        """
        trainer = trainer_of(self.lightning_module)
        if trainer is None or "loops" not in checkpoint or not self._is_fit:
            return checkpoint, 0
        number = self._num_accumulated(trainer)
        is_last_batch = not number and not _is_in_batch(trainer)
        if is_last_batch and not is_at_end_of_epoch(checkpoint["loops"]):
            return checkpoint, 0
        loops = rewind_to_last_step(checkpoint["loops"], number, is_last_batch=is_last_batch)
        return checkpoint | {"loops": loops}, number


def _is_in_batch(trainer: Trainer) -> bool:
    """Return whether a training batch has begun and is not processed."""
    current: Any = trainer.fit_loop.epoch_loop.batch_progress.current
    return bool(current.ready > current.processed)


def _may_save_on_exception(callback: Callback) -> bool:
    if hasattr(callback, "save_on_exception"):
        return bool(callback.save_on_exception)
    is_own = not type(callback).__module__.startswith(("lightning.", "pytorch_lightning."))
    has_hook = type(callback).on_exception is not Callback.on_exception
    return has_hook and (is_own or type(callback).__name__ == "OnExceptionCheckpoint")
