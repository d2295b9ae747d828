"""Watch a run with several ranks: begin and end the watcher of this rank, and end a run that hangs."""

import atexit
import uuid
from collections.abc import Callable
from contextlib import ExitStack

from lightning.pytorch.trainer.states import TrainerStatus

from lightning_paral.compat.torch.process_groups import call_on_mismatch, use_default_timeout
from lightning_paral.distributed.exchange import RankGroup
from lightning_paral.distributed.failure import FailureWatch
from lightning_paral.distributed.hangs import DIFFERENT, Hangs
from lightning_paral.distributed.launcher import end_with_error
from lightning_paral.distributed.process_group import release_process_group
from lightning_paral.distributed.watcher import RankWatcher
from lightning_paral.errors import ProcessGroupError
from lightning_paral.model.user_hooks import trainer_of
from lightning_paral.strategies.after_failure import AfterFailure, describe_position


class RunWatch(AfterFailure):
    """The part of a strategy that knows whether its run lives: its watcher, hangs, and failures, in each of its runs.

    A strategy has one for all of its runs. Between `begin` and `end` there is a run.
    """

    _undo_run: ExitStack | None = None
    """During a run, what undoes what holds for its duration only."""

    @property
    def name(self) -> str:
        """The name of the run, equal on all ranks; empty between runs."""
        return self._run

    @property
    def watcher(self) -> RankWatcher | None:
        """During a run with several ranks, the thread that exchanges messages with the other ranks."""
        return self._watcher

    @property
    def is_failing(self) -> bool:
        """Whether an exception ended the run, and the teardown is not finished."""
        return self._is_failing

    def reachable(self) -> RankGroup | None:
        """Return the ranks that can be reached: all of them, or after a failure `None`, unless all raised together.

        The first call after a failure is *collective*, but returns if some rank does not call it.
        """
        return self._reachable()

    def saving_ranks(self) -> RankGroup | None:
        """Return the ranks that save after a failure; `None` if this rank is not one of them."""
        return self._saving_ranks()

    def forget_last(self) -> None:
        """Forget how the last run ended."""
        self._why_interrupted = ""

    def begin(self) -> None:
        """Agree on a name for the run, by which ranks find each other after an exception. *Collective*."""
        self._reached, self._step = None, ""
        if self._undo_run is None:
            self._undo_run = ExitStack()
            self._undo_run.callback(use_default_timeout(self.timeout))
        self._end_watching()
        self._run = uuid.uuid4().hex
        if self.world_size == 1:
            return
        self._run = self._strategy.broadcast(self._run)
        self._watcher = RankWatcher(self._run, self.timeout.total_seconds() + 5.0)
        self._failures = FailureWatch(self._watcher)
        self._watcher.add(self._failures)
        requeue = getattr(self._strategy.cluster_environment, "requeue_signal", None)  # of SLURM
        takes_signal = getattr(requeue, "name", "") != "SIGUSR2"
        self._hangs = Hangs(self._watcher, self.timeout, self._timeout_option, takes_signal=takes_signal)
        self._watcher.add(self._hangs)
        call_on_mismatch(self._end_after_mismatch)

    def end(self) -> None:
        """End the run; after a failure with several ranks, release the process group, in which ranks may still wait."""
        try:
            self._end_watching()
        finally:
            for undo in (self._undo_guard, self._undo_run):
                if undo is not None:
                    undo.close()
            self._undo_guard = self._undo_run = None
            trainer = trainer_of(self.lightning_module)
            if trainer is not None and trainer.state.status == TrainerStatus.INTERRUPTED and self.world_size > 1:
                release_process_group(after_failure=True)
            self._run, self._reached = "", None

    def _end_watching(self) -> None:
        call_on_mismatch(None)
        if self._watcher is not None:
            self._watcher.end()
        if self._hangs is not None:
            self._hangs.end()
        if self._failures is not None:
            self._failures.end()
            self._why_interrupted = self._failures.first.why_interrupted()
        self._watcher = self._hangs = self._failures = None

    def hear_signal(self, signum: int, call: Callable[[], None]) -> None:
        """Call `call` in a thread after each signal `signum`, even if the main thread waits in a collective.

        Does nothing outside of a run with several ranks.
        """
        if self._watcher is not None:
            self._watcher.hear(signum, call)

    def end_hung_run(self, why: str, remedy: str = "") -> None:
        """End the run on all ranks, wherever they wait, with an error that says where. Call this in a thread.

        Args:
            why: a sentence about why the run ends, which comes before where the ranks are.
            remedy: what to do, which comes after it.
        """
        hangs, failures, trainer = self._hangs, self._failures, trainer_of(self.lightning_module)
        if hangs is not None and failures is not None and trainer is not None:
            where = hangs.where_all_are(why)
            error = ProcessGroupError(where if remedy in where else f"{where} {remedy}")
            failures.end_with(error, describe_position(trainer))

    def log_where_all_are(self, why: str) -> None:
        """Log in which line each rank is, after the sentence `why`. Call this in a thread."""
        if self._hangs is not None:
            self._hangs.where_all_are(why)

    def _end_after_mismatch(self) -> None:
        atexit.register(end_with_error)  # otherwise Python would wait for gloo's thread when it exits
        self.end_hung_run("A rank sent more to another one than its collective takes.", DIFFERENT)
