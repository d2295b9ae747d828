"""Save and stop before a scheduler ends the job."""

import os
import signal
import sys
import threading
import time
import traceback
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerStatus
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_paral.callbacks import slurm
from lightning_paral.compat.lightning import preemption as lightning_preemption
from lightning_paral.distributed.failures.departures import agree_on_exit
from lightning_paral.distributed.signals import call_on_signal
from lightning_paral.distributed.stop_agreement import StopAgreement
from lightning_paral.errors import ConfigurationError
from lightning_paral.option_types import check_at_least, checked_options

_HANG_SECONDS = 20.0  # 10 seconds before schedulers kill
_SAME_SIGNAL_SECONDS = 3.0
"""Signals that follow the first one within this time are copies of it: torchrun and launchers forward signals."""


class Preemption(Callback):
    """Saves one checkpoint and ends the fit when the scheduler is about to end the job: `Preemption()`.

    SIGTERM, SIGUSR1 and a deadline have this effect, on whichever rank they arrive: all ranks complete the same
    training batch, the accumulation of gradients, and the validation that follows, if one does. They save together and
    exit. A resumed fit continues with the next batch. Under SLURM, SIGUSR1 and the deadline also requeue the job.

    A second signal ends the process immediately, unless SLURM has requeued the job. Nothing is damaged then: a
    checkpoint has its name only when it is complete. Signal handlers that were set before the fit are still called. In
    evaluation and prediction, which have nothing to save, the callback restores the default actions of the signals.

    Args:
        dirpath: the folder in which to save `preempted-step=N.ckpt`, where N is the number of optimizer steps. By
            default, the folder of the first `ModelCheckpoint`, or else `default_root_dir`. Under SLURM with automatic
            requeueing, `hpc_ckpt_N.ckpt` in `default_root_dir`, from which Lightning resumes a requeued job.
        max_time: how long the job may take, from the beginning of the fit, as `"DD:HH:MM:SS"` or a timedelta. In a job
            of SLURM, its end time is known from `SLURM_JOB_END_TIME`.
        margin: the number of seconds before the deadline at which to stop. `None` ignores `SLURM_JOB_END_TIME`.
        grace: the number of seconds after which the run ends even if the batch hangs or the checkpoint is not saved.
            By default, a run of several ranks ends if, for 20 seconds after SIGTERM, no batch ends and nothing is
            saved; otherwise the scheduler decides: torchrun kills after 30 seconds, and SLURM 30 seconds after its
            SIGTERM.
        exit_status: the status with which the process exits. `"signal"` means 128 + the number of the signal, such as
            143, and 143 after a deadline. `"return"` lets `trainer.fit` return instead; see `was_preempted`.
        requeue: whether to requeue jobs of SLURM, unless `SLURMEnvironment(auto_requeue=False)` is used.

    Raises:
        ConfigurationError: an option has a value that cannot work.
    """

    _saves = True

    @checked_options
    def __init__(
        self,
        dirpath: str | Path | None = None,
        max_time: str | timedelta | None = None,
        margin: float | None = 60.0,
        grace: float | None = None,
        exit_status: int | Literal["signal", "return"] = "signal",
        requeue: bool = True,
    ) -> None:
        check_at_least("Preemption", "margin", margin, 0.0)
        check_at_least("Preemption", "grace", grace, 0.0)
        self.dirpath, self.margin, self.grace = dirpath, margin, grace
        self.exit_status, self.requeue = exit_status, requeue
        self.max_seconds = None if max_time is None else _seconds(max_time)
        if self.max_seconds is not None and self.max_seconds <= (margin or 0.0):
            raise ConfigurationError(
                f"Preemption(max_time={max_time!r}) is not longer than margin={margin} seconds. Give a longer time, or "
                "a shorter margin."
            )
        self.was_preempted = False
        """Whether the last fit was stopped before its end."""
        self.checkpoint_path: str | None = None
        """Where the last fit was saved when it was stopped."""
        self._agreement: StopAgreement | None = None
        self._undo = ExitStack()
        self._signum: int | None = None
        self._signaled_at = 0.0
        self._is_requeueing = False
        self._is_saving = False
        self._num_batches = 0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Take over the signals, and begin to listen to the other ranks.

        Raises:
            ConfigurationError: there are several ranks, and the strategy is not one of this package.
        """
        self._undo.close()
        self._undo = ExitStack()
        lightning_preemption.take_over_signals(trainer, lambda: self._end(trainer), self._undo)
        if stage != "fit":
            return
        self.was_preempted, self.checkpoint_path = False, None
        self._signum, self._num_batches, self._is_requeueing, self._is_saving = None, 0, False, False
        watcher = getattr(trainer.strategy, "_watcher", None)
        if watcher is None and trainer.world_size > 1:
            raise ConfigurationError(
                f"Preemption was given to a Trainer with {type(trainer.strategy).__name__} and {trainer.world_size} "
                "ranks. Several ranks need a strategy of lightning_paral, such as "
                "strategy='paral_ddp'."
            )
        self._agreement = StopAgreement(watcher, partial(self._on_request, trainer))
        self._undo.callback(self._agreement.end)
        for signum in {signal.SIGTERM, slurm.requeue_signal(trainer) if self._saves else signal.SIGTERM}:
            self._undo.callback(call_on_signal(signum, lambda signum=signum: self._on_signal(signum)))  # type: ignore[misc]
        self._set_deadline()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check after each batch from now on whether to stop."""
        lightning_preemption.stop_between_batches(trainer, self._is_stop, lambda: self._save(trainer), self._undo)

    def _is_stop(self) -> bool:
        self._num_batches += 1
        assert self._agreement is not None
        return self._agreement.is_stop(self._num_batches)

    def _save(self, trainer: Trainer) -> None:
        """Save a checkpoint, and requeue a job of SLURM. *Collective* over the world."""
        assert self._agreement is not None
        self._is_saving = True
        what = "Saving and stopping" if self._saves else "Stopping"
        rank_zero_info(f"{self._agreement.reason}. {what} after optimizer step {trainer.global_step}.")
        if not self._saves:
            lightning_preemption.set_received_sigterm(trainer)
            raise SIGTERMException  # as Lightning's loop does
        path = self._path(trainer)
        trainer.save_checkpoint(path)
        finish = getattr(trainer.strategy, "finish_saving", None)
        if finish is not None:
            finish()
        reason = self._agreement.reason
        is_cancelled = reason == _reason(signal.SIGTERM)  # by `scancel`, or SLURM requeues the job itself
        if self.requeue and slurm.requeues(trainer) and not is_cancelled:
            self._is_requeueing = True  # before SLURM signals the ranks of the job that it requeues
            if trainer.is_global_zero:
                # Now, while the other ranks wait: when the first of them exits, srun may end the job.
                self._is_requeueing = slurm.requeue_job()
        self.was_preempted = True
        self.checkpoint_path, self._is_requeueing = trainer.strategy.broadcast((path, self._is_requeueing))
        if self.exit_status != "return":
            agree_on_exit(self._status(reason))
        lightning_preemption.set_received_sigterm(trainer)

    def _path(self, trainer: Trainer) -> str:
        if self.requeue and slurm.requeues(trainer):
            return lightning_preemption.requeued_checkpoint_path(trainer)
        callback: Any = trainer.checkpoint_callback
        folder = self.dirpath or getattr(callback, "dirpath", None) or trainer.default_root_dir
        return os.path.join(folder, f"preempted-step={trainer.global_step}.ckpt")

    def _end(self, trainer: Trainer) -> None:
        """Give the signals back at the end of a run. If it was preempted, requeue the job and exit."""
        agreement, self._agreement = self._agreement, None
        self._undo.close()
        if agreement is None or trainer.state.status == TrainerStatus.INTERRUPTED:
            return
        if not self.was_preempted:
            if self._signum == signal.SIGTERM and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
                rank_zero_info("The fit ended before it could be preempted. SIGTERM now ends the process.")
                os.kill(os.getpid(), signal.SIGTERM)
            return
        rank_zero_info(f"{agreement.reason}. Training can be resumed from {self.checkpoint_path}.")
        if self.exit_status == "return":
            return
        for callback in trainer.checkpoint_callbacks:
            vars(callback)["on_exception"] = _do_nothing  # they would save the same state again
        raise SystemExit(self._status(agreement.reason))

    def _status(self, reason: str) -> int:
        """Return the exit status, which is the same on all ranks."""
        if isinstance(self.exit_status, int):
            return self.exit_status
        signums = [signum for signum in signal.Signals if _reason(signum) == reason]
        return 128 + (signums[0] if signums else signal.SIGTERM)

    # Called in other threads

    def _on_signal(self, signum: int) -> None:
        now = time.monotonic()
        if self._signum is None:
            self._signum, self._signaled_at = signum, now
            if self._agreement is not None:
                self._agreement.request(_reason(signum))
        elif now - self._signaled_at > _SAME_SIGNAL_SECONDS and not self._is_requeueing:
            _exit_now(f"A second signal, {signal.Signals(signum).name}, ends the process", 128 + signum)

    def _on_request(self, trainer: Trainer, reason: str) -> None:
        may_hang = trainer.world_size > 1 and reason == _reason(signal.SIGTERM)
        seconds = _HANG_SECONDS if self.grace is None and may_hang else self.grace
        if seconds is not None:
            self._start_timer(seconds, partial(self._end_late, trainer, reason, seconds, _num_ended(trainer)))

    def _end_late(self, trainer: Trainer, reason: str, seconds: float, num_ended: int) -> None:
        """End the run after the grace period; without one, if no batch has ended since there were `num_ended`."""
        if self.grace is None and (self._is_saving or _num_ended(trainer) > num_ended or _is_in("save_checkpoint")):
            self._on_request(trainer, reason)
        elif self._is_saving or trainer.world_size == 1:
            _exit_now(f"{reason}, and no checkpoint is complete after grace={seconds:g} s", self._status(reason))
        else:
            getattr(trainer.strategy, "end_hung_run")(f"{reason}, but no batch ended for {seconds:g} s.")  # noqa: B009

    def _set_deadline(self) -> None:
        left = self.max_seconds
        end = os.environ.get("SLURM_JOB_END_TIME", "")
        if self.margin is not None and end.isdigit():
            left_of_job = int(end) - time.time()
            if left_of_job <= self.margin:
                rank_zero_warn(
                    f"The job ends in {left_of_job:.0f} s (SLURM_JOB_END_TIME), which is less than "
                    f"Preemption(margin={self.margin:g}), so this deadline is ignored. Give the job more time, or "
                    "decrease the margin."
                )
            else:
                left = min(left_of_job, left_of_job if left is None else left)
        if left is not None:
            agreement = self._agreement
            assert agreement is not None
            self._start_timer(left - (self.margin or 0.0), lambda: agreement.request("The deadline of the job is near"))

    def _start_timer(self, seconds: float, call: Any) -> None:
        timer = threading.Timer(min(seconds, threading.TIMEOUT_MAX), call)
        timer.daemon = True
        timer.start()
        self._undo.callback(timer.cancel)


def _reason(signum: int) -> str:
    return f"The job received {signal.Signals(signum).name}"


def _exit_now(message: str, status: int) -> None:
    os.write(2, f"{message}. An earlier checkpoint is intact.\n".encode())
    os._exit(status)


def _do_nothing(*_: Any) -> None:
    """Take the place of a hook."""


def _seconds(max_time: str | timedelta) -> float:
    """Return a time in seconds.

    Raises:
        ConfigurationError: the string has another format.
    """
    if isinstance(max_time, timedelta):
        return max_time.total_seconds()
    try:
        days, hours, minutes, seconds = (int(part) for part in max_time.split(":"))
    except ValueError as error:
        raise ConfigurationError(
            f"Preemption(max_time={max_time!r}) has another format than 'DD:HH:MM:SS', such as '00:11:30:00' for 11.5 "
            "hours. Give such a string, or a timedelta."
        ) from error
    return timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds).total_seconds()


def _num_ended(trainer: Trainer) -> int:
    """Return how many batches of training and validation have ended."""
    epoch = trainer.fit_loop.epoch_loop
    return epoch.batch_progress.total.completed + epoch.val_loop.batch_progress.total.completed


def _is_in(function: str) -> bool:
    """Return whether the main thread is in a function of this name."""
    frame = sys._current_frames()[threading.main_thread().ident or 0]
    return any(each.f_code.co_name == function for each, _ in traceback.walk_stack(frame))


class _StopOnSigterm(Preemption):
    """Stops all ranks after the same batch, as Lightning does after SIGTERM, and saves nothing."""

    _saves = False


def handle_signals(trainer: Trainer) -> None:
    """Handle signals without the user's `Preemption`: add one if SLURM requeues the job, otherwise stop on SIGTERM.

    Lightning's own handlers save, and call collectives, at any line of a step, which several ranks cannot do.
    """
    callbacks: list[Callback] = vars(trainer)["callbacks"]
    users = [callback for callback in callbacks if isinstance(callback, Preemption)]
    for callback in users:
        if callback._agreement is not None:  # with the watcher of a strategy that `paral_auto` has replaced
            signum = callback._signum
            callback.setup(trainer, trainer.lightning_module, trainer.state.fn or "")
            if signum is not None:
                callback._on_signal(signum)
    if users:
        return
    lightning_preemption.end_handling(trainer)  # that `paral_auto` has begun
    if slurm.requeues(trainer):
        callbacks.insert(0, Preemption(margin=None))
    elif trainer.world_size > 1:
        stop = _StopOnSigterm(margin=None)  # not among the callbacks, which profilers list
        stop.setup(trainer, trainer.lightning_module, trainer.state.fn or "")
        stop.on_train_start(trainer, trainer.lightning_module)
