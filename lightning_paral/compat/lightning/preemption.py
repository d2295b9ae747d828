"""Stop a fit between two batches, so that a resumed fit continues with the next one."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from lightning.pytorch import Trainer

from lightning_paral.compat.lightning.loops import is_accumulating
from lightning_paral.compat.lightning.methods import shadow_method
from lightning_paral.compat.private_name import Names

NAMES: Names = {
    "lightning.pytorch.loops._TrainingEpochLoop": {
        "on_advance_end(data_fetcher)": "stop after a batch and its validation, before the next is fetched",
        "_should_check_val_fx(data_fetcher)": "know whether Lightning counts a batch twice when a fit resumes",
        "._batches_that_stepped": "correct the step of the loggers in the saved checkpoint",
    },
    "lightning.pytorch.loops._FitLoop": {
        "advance": "leave an epoch that is not finished without its end hooks",
        "on_run_end": "leave a fit that is not finished without on_train_end",
    },
}


def stop_between_batches(
    trainer: Trainer, is_stop: Callable[[], bool], on_stop: Callable[[], None], undo: ExitStack
) -> None:
    """Call `is_stop` after each training batch and its validation; if it returns true, call `on_stop` and end the fit.

    The hooks of the end of an epoch and of the training are not called. A checkpoint that `on_stop` saves resumes with
    the next batch.

    Args:
        trainer: the Trainer, at the beginning of a fit.
        is_stop: a function without side effects on the training. It is not called after batches after which the fit
            cannot stop: the last one, and those in an accumulation window, whose gradients no checkpoint has.
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
        if is_accumulating(trainer) or _is_last(trainer) or not is_stop():
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
            on_run_end()

    shadow_method(epoch_loop, "on_advance_end", end_batch, undo)
    shadow_method(fit_loop, "advance", run_epoch, undo)
    shadow_method(fit_loop, "on_run_end", end_run, undo)


def _is_last(trainer: Trainer) -> bool:
    """Return whether the fit ends after the current batch by itself."""
    is_stopping = trainer.should_stop and trainer.fit_loop.epoch_loop.done
    return is_stopping or trainer.global_step >= trainer.max_steps > -1
