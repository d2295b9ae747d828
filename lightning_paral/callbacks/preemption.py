"""Save and stop before a scheduler ends the job."""

import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, Literal

from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Timer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_paral.compat.lightning.loops import stop_between_batches
from lightning_paral.compat.lightning.methods import shadow_method
from lightning_paral.distributed.exchange import gather_int_lists
from lightning_paral.distributed.launcher import agree_on_exit
from lightning_paral.distributed.watcher import SignalHandler, handler_of
from lightning_paral.errors import ConfigurationError
from lightning_paral.option_types import AtLeast, checked

_SAME_SIGNAL_SECONDS = 3.0
"""Signals that follow the first one within this time are copies of it: torchrun and launchers forward signals."""
_MOST_BATCHES = 64
"""Ranks tell each other about once per second whether to stop, and after this number of batches at the latest."""
_HUNG_SECONDS = 20.0
"""How long after SIGTERM ranks that have not stopped say where they are: torchrun and SLURM kill after 30 seconds."""
_DEADLINE = -1
"""In the place of the number of a signal."""


@checked
class Preemption(Callback):
    """Saves one checkpoint and ends the fit when the scheduler is about to end the job: `Preemption()`.

    SIGTERM, SIGUSR1 and a deadline have this effect, on whichever rank they arrive: within about a second, or after the
    present batch if that takes longer, all ranks complete the same training batch, the accumulation of gradients, and
    the validation that follows, if one does. They save together and exit. A resumed fit continues with the next batch.
    Under SLURM, SIGUSR1 and the deadline also requeue the job.

    A second signal ends the process as soon as its main thread runs Python code, unless SLURM has requeued the job.
    Nothing is damaged then: a checkpoint has its name only when it is complete. Signal handlers that were set before
    the fit are still called, and handle signals alone before training or the sanity check begins, and in evaluation and
    prediction, which have nothing to save.

    Args:
        dirpath: the folder in which to save `preempted-step=N.ckpt`, where N is the number of optimizer steps. By
            default, the folder of the first `ModelCheckpoint`, or else `default_root_dir`. Under SLURM with automatic
            requeueing, `hpc_ckpt_N.ckpt` in `default_root_dir`, from which Lightning resumes a requeued job.
        max_time: how long the job may take, from the beginning of the fit, as `"DD:HH:MM:SS"` or a timedelta. In a job
            of SLURM, its end time is known from `SLURM_JOB_END_TIME`.
        margin: the number of seconds before the deadline at which to stop. `None` ignores `SLURM_JOB_END_TIME`. A
            deadline that is nearer when the fit begins is ignored, with a warning.
        exit_status: the status with which the process exits. `"signal"` means 128 + the number of the signal, such as
            143, and 143 after a deadline. `"return"` lets `trainer.fit` return instead; see `was_preempted`.
        requeue: whether to requeue jobs of SLURM, unless `SLURMEnvironment(auto_requeue=False)` is used.

    Raises:
        ConfigurationError: an option has a value that cannot work.
    """

    _saves = True

    def __init__(
        self,
        dirpath: str | Path | None = None,
        max_time: str | timedelta | None = None,
        margin: Annotated[float, AtLeast(0)] | None = 60.0,
        exit_status: int | Literal["signal", "return"] = "signal",
        requeue: bool = True,
    ) -> None:
        self.dirpath, self.margin = dirpath, margin
        self.exit_status, self.requeue = exit_status, requeue
        self.max_seconds = Timer(max_time).time_remaining()  # which parses it
        self.was_preempted = False
        """Whether the last fit was stopped before its end."""
        self.checkpoint_path: str | None = None
        """Where the last fit was saved when it was stopped."""
        self._undo, self._undo_after = ExitStack(), ExitStack()
        self._handlers: dict[int, Any] = {}
        """The handlers of the signals when the run began."""
        self._is_listening = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Note the deadline, and the handlers of signals, before Lightning sets its own.

        Raises:
            ConfigurationError: there are several ranks, and the strategy is not one of this package.
        """
        self.end()
        self._undo_after.close()
        environment = _slurm(trainer)
        requeue_signal = (environment and environment.requeue_signal) or signal.SIGUSR1
        signums = (signal.SIGTERM, requeue_signal) if self._saves else (signal.SIGTERM,)
        self._handlers = {signum: handler_of(signum) for signum in signums}
        if stage != "fit":
            return
        if trainer.world_size > 1 and not hasattr(trainer.strategy, "watch"):
            raise ConfigurationError(
                f"Preemption was given to a Trainer with {type(trainer.strategy).__name__} and {trainer.world_size} "
                "ranks. Several ranks need a strategy of lightning_paral, such as strategy='paral_ddp'."
            )
        self.was_preempted, self.checkpoint_path = False, None
        self._signum, self._signaled_at, self._cause = 0, 0.0, 0
        self._is_requeueing = False
        self._timer: threading.Timer | None = None
        """From SIGTERM on, what says where the ranks are if they do not stop."""
        self._ask_soon: Callable[[], None] = _do_nothing
        self._deadline = self._find_deadline()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check about once per second from now on whether to stop."""
        self._take_signals(trainer)
        self._last_ask = time.monotonic(), 0
        ask_soon = stop_between_batches(trainer, partial(self._ask, trainer), partial(self._save, trainer), self._undo)
        if trainer.world_size == 1:
            self._ask_soon = ask_soon

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take the signals from Lightning's handlers, which call collectives at any line."""
        self._take_signals(trainer)

    on_test_start = on_predict_start = on_validation_start

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """End listening to signals. After a fit that was stopped, exit."""
        self.end()
        if stage == "fit" and self.was_preempted and self.exit_status != "return":
            for callback in trainer.checkpoint_callbacks:
                # They would save the same state again.
                shadow_method(callback, "on_exception", _do_nothing, self._undo_after)
            raise SystemExit(self._status(self._cause))

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """End listening to signals, because `teardown` is not called after an exception."""
        self.end()

    def end(self) -> None:
        """End listening to signals, and restore the loops of the Trainer."""
        self._is_listening = False
        self._undo.close()

    def _take_signals(self, trainer: Trainer) -> None:
        """Replace the handlers that Lightning has set after the hooks `setup`; it restores the earlier ones itself."""
        if self._is_listening or threading.current_thread() is not threading.main_thread():
            return
        self._is_listening = trainer.state.fn == "fit"
        for signum, previous in self._handlers.items():
            if self._is_listening:
                call = partial(self._on_signal, trainer, previous)
                self._undo.callback(SignalHandler(signum, call, previous).restore)
            else:
                signal.signal(signum, previous)
        watching = _watching(trainer)
        if watching is not None and self._is_listening:
            watching.watcher.hear(signal.SIGTERM, partial(self._expect_end, trainer))

    def _on_signal(self, trainer: Trainer, previous: Any, signum: int, frame: FrameType | None) -> None:
        """Note the signal, after the handler before this one."""
        if callable(previous):
            previous(signum, frame)
        now = time.monotonic()
        if not self._signum:
            self._signum, self._signaled_at = signum, now
            self._ask_soon()
            if signum == signal.SIGTERM:
                self._expect_end(trainer)
        elif now - self._signaled_at > _SAME_SIGNAL_SECONDS and not self._is_requeueing:
            _exit_now(f"A second signal, {signal.Signals(signum).name}, ends the process", 128 + signum)

    def _ask(self, trainer: Trainer, num_batches: int) -> int:
        """Return 0 if any rank has a reason to stop, otherwise after how many batches to ask again. *Collective*."""
        cause = self._signum or (_DEADLINE if self._deadline is not None and time.time() >= self._deadline else 0)
        if trainer.world_size == 1:
            self._cause = cause
            return int(not cause)
        now, (began, num_before) = time.monotonic(), self._last_ask
        self._last_ask = now, num_batches
        # A search for a learning rate trains inside the fit, so that two loops ask.
        rows = gather_int_lists([cause, int(1e6 * (now - began)) // max(1, num_batches - num_before)])
        self._cause = next((cause for cause, _ in rows if cause), 0)
        per_second = int(1e6) // max(1, *(micros for _, micros in rows))
        return 0 if self._cause else max(1, min(per_second, _MOST_BATCHES))

    def _save(self, trainer: Trainer) -> None:
        """Save a checkpoint, and requeue a job of SLURM. *Collective* over the world."""
        if self._timer is not None:
            self._timer.cancel()
        what = "Saving and stopping" if self._saves else "Stopping"
        rank_zero_info(f"{_reason(self._cause)}. {what} after optimizer step {trainer.global_step}.")
        if not self._saves:
            raise SIGTERMException  # as Lightning's loop does
        path = trainer.strategy.broadcast(self._path(trainer))
        trainer.save_checkpoint(path)
        getattr(trainer.strategy, "finish_saving", lambda: None)()
        # After SIGTERM, the job was cancelled, or SLURM requeues it itself.
        if self.requeue and _requeues(trainer) and self._cause != signal.SIGTERM:
            self._is_requeueing = True  # before SLURM signals the ranks of the job that it requeues
            # Now, while the other ranks wait: when the first of them exits, srun may end the job.
            self._is_requeueing = trainer.strategy.broadcast(trainer.is_global_zero and _requeue_job())
        self.was_preempted, self.checkpoint_path = True, path
        if self.exit_status != "return":
            agree_on_exit(self._status(self._cause))
        rank_zero_info(f"Training can be resumed from {path}.")

    def _path(self, trainer: Trainer) -> str:
        root = str(trainer.default_root_dir)
        if self.requeue and _requeues(trainer):  # where Lightning looks when SLURM has requeued the job
            files = get_filesystem(root)
            names = map(str, files.ls(root, detail=False) if files.isdir(root) else [])
            numbers = [int(number) for name in names for number in re.findall(r"hpc_ckpt_(\d+)\.ckpt$", name)]
            return os.path.join(root, f"hpc_ckpt_{max(numbers, default=0) + 1}.ckpt")
        folder = self.dirpath or getattr(trainer.checkpoint_callback, "dirpath", None) or root
        return os.path.join(folder, f"preempted-step={trainer.global_step}.ckpt")

    def _status(self, cause: int) -> int:
        """Return the exit status, which is the same on all ranks."""
        return self.exit_status if isinstance(self.exit_status, int) else 128 + (max(cause, 0) or signal.SIGTERM)

    def _find_deadline(self) -> float | None:
        """Return when to stop, in seconds since 1970; `None` without a deadline."""
        end, margin = os.environ.get("SLURM_JOB_END_TIME", ""), self.margin or 0.0
        left = [] if self.max_seconds is None else [self.max_seconds]
        if end.isdigit() and self.margin is not None:
            left.append(int(end) - time.time())
        if left and min(left) <= margin:
            rank_zero_warn(
                f"The job ends in {min(left):.0f} s (max_time or SLURM_JOB_END_TIME), which is not longer than "
                f"Preemption(margin={margin:g}), so this deadline is ignored. Give the job more time, or decrease the "
                "margin."
            )
            return None
        return time.time() + min(left) - margin if left else None

    def _expect_end(self, trainer: Trainer) -> None:
        """Look for dead ranks after SIGTERM, and say later where all are. Called in a thread if the main one hangs."""
        watching = _watching(trainer)
        if not self._is_listening or self._timer is not None or watching is None:
            return
        why = f"{_reason(signal.SIGTERM)}, but the fit has not stopped for {_HUNG_SECONDS:g} s."
        self._timer = threading.Timer(_HUNG_SECONDS, watching.hangs.where_all_are, (why,))
        self._timer.daemon = True
        self._timer.start()
        self._undo.callback(self._timer.cancel)
        watching.failures.ask_who_lives()  # torchrun sends SIGTERM also if a process has died


class _StopOnSigterm(Preemption):
    """Stops all ranks after the same batch, as Lightning does after SIGTERM, and saves nothing."""

    _saves = False


def handle_signals(trainer: Trainer) -> Preemption | None:
    """Handle signals without the user's `Preemption`: add one if SLURM requeues the job, otherwise stop on SIGTERM.

    Lightning's own handlers save, and call collectives, at any line of a step, which several ranks cannot do.

    Returns:
        Preemption | None: what stops on SIGTERM. It is not among the callbacks, which profilers list, so the caller
            calls its hooks.
    """
    callbacks: list[Callback] = vars(trainer)["callbacks"]
    if any(isinstance(callback, Preemption) for callback in callbacks):
        return None
    if _requeues(trainer):
        callbacks.insert(0, Preemption(margin=None))
        return None
    if trainer.world_size == 1:
        return None
    stop = _StopOnSigterm(margin=None)
    stop.setup(trainer, trainer.lightning_module, trainer.state.fn or "")
    return stop


def _do_nothing(*_: object) -> None:
    pass


def _slurm(trainer: Trainer) -> SLURMEnvironment | None:
    environment = getattr(trainer.strategy, "cluster_environment", None)
    return environment if isinstance(environment, SLURMEnvironment) else None


def _requeues(trainer: Trainer) -> bool:
    environment = _slurm(trainer)
    return environment is not None and environment.auto_requeue


def _requeue_job() -> bool:
    """Requeue the job of this process, or warn that this failed. Return whether it was requeued."""
    job = os.environ.get("SLURM_JOB_ID", "")
    if "SLURM_ARRAY_JOB_ID" in os.environ:
        job = "{SLURM_ARRAY_JOB_ID}_{SLURM_ARRAY_TASK_ID}".format_map(os.environ)
    try:
        subprocess.run(["scontrol", "requeue", job], capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        rank_zero_warn(
            f"The job was not requeued: `scontrol requeue {job}` failed with: {getattr(error, 'stderr', '') or error}. "
            "Run this command yourself: the checkpoint is complete."
        )
        return False
    rank_zero_info(f"Requeued the SLURM job {job}.")
    return True


def _reason(cause: int) -> str:
    return "The deadline of the job is near" if cause < 0 else f"The job received {signal.Signals(cause).name}"


def _exit_now(message: str, status: int) -> None:
    os.write(2, f"{message}. An earlier checkpoint is intact.\n".encode())
    os._exit(status)


def _watching(trainer: Trainer) -> Any:
    """Return what watches a run with several ranks under a strategy of this package, otherwise `None`."""
    return getattr(getattr(trainer.strategy, "watch", None), "watching", None)
