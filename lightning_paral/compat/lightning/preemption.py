"""Stop a fit between two batches, and take over the signals that Lightning handles."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from lightning.pytorch import Trainer

from lightning_paral.compat.lightning.loops import is_accumulating
from lightning_paral.compat.lightning.methods import shadow_method
from lightning_paral.compat.private_name import PrivateName

_SEEN = "lightning 2.6.1 to 2.6.6"
_CONNECTOR = "lightning.pytorch.trainer.connectors.signal_connector._SignalConnector"
NAMES = (
    *(
        PrivateName(
            name=f"lightning.pytorch.Trainer.{attribute}",
            on_instances=True,
            purpose="to reach Lightning's signal handlers, and the path of a requeued job's checkpoint",
            reason="no public name leads to them",
            seen=_SEEN,
        )
        for attribute in ("_signal_connector", "_checkpoint_connector")
    ),
    *(
        PrivateName(
            name=f"{_CONNECTOR}.{method}",
            parameters=("self",),
            purpose="to handle SIGTERM and SIGUSR1 instead of Lightning",
            reason="Lightning's handlers call collectives in the middle of a step, and no option turns them off",
            seen=_SEEN,
        )
        for method in ("register_signal_handlers", "teardown")
    ),
    PrivateName(
        name=f"{_CONNECTOR}.received_sigterm",
        on_instances=True,
        purpose="to set trainer.received_sigterm",
        reason="the public property has no setter",
        seen=_SEEN,
    ),
    PrivateName(
        name="lightning.pytorch.loops._TrainingEpochLoop.on_advance_end",
        parameters=("self", "data_fetcher"),
        purpose="to stop after a batch and its validation, before the next batch is fetched",
        reason="on_train_batch_start comes after the fetch, whose random numbers would be drawn twice",
        seen=_SEEN,
    ),
    PrivateName(
        name="lightning.pytorch.loops._FitLoop.advance",
        parameters=("self",),
        purpose="to leave an epoch that is not finished without its end hooks",
        reason="trainer.should_stop runs the hooks of an epoch's end, which would save and count the epoch",
        seen=_SEEN,
    ),
    PrivateName(
        name="lightning.pytorch.loops._FitLoop.on_run_end",
        parameters=("self",),
        purpose="to leave a fit that is not finished without on_train_end",
        reason="trainer.should_stop runs these hooks",
        seen=_SEEN,
    ),
    PrivateName(
        name="lightning.pytorch.loops._FitLoop._can_stop_early",
        purpose="to let a fit end that stops by itself after the current batch",
        reason="trainer.should_stop alone does not tell whether min_epochs and min_steps are reached",
        seen=_SEEN,
    ),
    PrivateName(
        name="lightning.pytorch.loops._TrainingEpochLoop._should_check_val_fx",
        parameters=("self", "data_fetcher"),
        purpose="to know whether Lightning counts a batch twice when a fit is resumed after its validation",
        reason="no public name tells when validation is due",
        seen=_SEEN,
    ),
    PrivateName(
        name="lightning.pytorch.loops._TrainingEpochLoop._batches_that_stepped",
        on_instances=True,
        purpose="to correct the step of the loggers in the saved checkpoint",
        reason="Lightning increments it again when a fit is resumed after a validation",
        seen=_SEEN,
    ),
    PrivateName(
        name="lightning.pytorch.trainer.connectors.checkpoint_connector._CheckpointConnector.hpc_save_path",
        parameters=("folderpath",),
        purpose="to save where Lightning looks when SLURM has requeued a job",
        reason="no public name has the path",
        seen=_SEEN,
    ),
)


def stop_between_batches(trainer: Trainer, is_stop: Callable[[], bool], on_stop: Callable[[], None], undo: Any) -> None:
    """Call `is_stop` after each training batch and its validation; if it returns true, call `on_stop` and end the fit.

    *Collective* over the world at the end of the training.

    The hooks of the end of an epoch and of the training are not called. A checkpoint that `on_stop` saves resumes with
    the next batch.

    Args:
        trainer: the Trainer, at the beginning of a fit.
        is_stop: a function without side effects on the training.
        on_stop: a function that saves.
        undo: an `ExitStack` that restores Lightning's methods.
    """
    fit_loop: Any = trainer.fit_loop
    epoch_loop = fit_loop.epoch_loop
    advance, on_advance_end, on_run_end = fit_loop.advance, epoch_loop.on_advance_end, fit_loop.on_run_end
    has_stopped = False

    def end_batch(data_fetcher: Any) -> None:
        nonlocal has_stopped
        on_advance_end(data_fetcher)
        if not is_stop() or _must_continue(trainer):
            return
        # The resumed fit skips the validation that is done, but counts the batch again.
        is_counted_again = epoch_loop._should_check_val_fx(data_fetcher)
        epoch_loop._batches_that_stepped -= is_counted_again
        on_stop()
        epoch_loop._batches_that_stepped += is_counted_again
        has_stopped = True
        raise StopIteration

    def run_epoch() -> None:
        advance()
        if has_stopped:
            raise StopIteration

    def end_run() -> None:
        if not has_stopped:
            trainer.strategy.barrier("no rank waits for this rank's answer to `is_stop`")
            on_run_end()

    shadow_method(epoch_loop, "on_advance_end", end_batch, undo)
    shadow_method(fit_loop, "advance", run_epoch, undo)
    shadow_method(fit_loop, "on_run_end", end_run, undo)


def _must_continue(trainer: Trainer) -> bool:
    """Return whether the fit ends after the current batch, or gradients are accumulated, which no checkpoint has."""
    is_stopping = trainer.should_stop and trainer.fit_loop._can_stop_early
    return is_accumulating(trainer) or is_stopping or trainer.global_step >= trainer.max_steps > -1


def take_over_signals(trainer: Trainer, at_end: Callable[[], None], undo: ExitStack) -> None:
    """Keep Lightning from handling signals in this run; call `at_end` last in the run's teardown, also after errors."""
    connector: Any = trainer._signal_connector
    connector.received_sigterm = False
    shadow_method(connector, "register_signal_handlers", lambda: None, undo)
    shadow_method(connector, "teardown", at_end, undo)


def end_handling(trainer: Trainer) -> None:
    """Give the signals of this run back, as the end of the run does."""
    trainer._signal_connector.teardown()


def set_received_sigterm(trainer: Trainer) -> None:
    """Make `trainer.received_sigterm` true."""
    trainer._signal_connector.received_sigterm = True


def requeued_checkpoint_path(trainer: Trainer) -> str:
    """Return the path at which Lightning's `ckpt_path="hpc"` will find the next checkpoint."""
    return str(trainer._checkpoint_connector.hpc_save_path(trainer.default_root_dir))
