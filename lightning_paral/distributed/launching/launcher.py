"""Lightning's subprocess launcher, which also reports failures first, and leaves no process behind."""

import atexit
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any, ClassVar, Protocol

from lightning.fabric.plugins import ClusterEnvironment
from lightning.pytorch import Trainer

from lightning_paral.compat.lightning.launchers import SubprocessScriptLauncher, TunerExit
from lightning_paral.distributed.launching.children import Children, describe_status
from lightning_paral.distributed.launching.launch_checks import check_port_is_free
from lightning_paral.distributed.process_group import serves_store

_PARENT_VARIABLE = "LIGHTNING_PARAL_LAUNCHER_PID"
"""The environment variable by which launched processes know the id of the process that started them."""

_GRACE_SECONDS = 3.0  # time for the other ranks to report their errors
log = logging.getLogger(__name__)


class LaunchedRun(Protocol):
    """What the launcher has to know about the run that it launches; the strategy provides it."""

    @property
    def is_in_run(self) -> bool:
        """Whether the ranks have joined, and the run has not ended."""

    @property
    def num_runs(self) -> int:
        """The number of runs for which the ranks have joined."""

    def report_failure(self, error: BaseException) -> BaseException:
        """Tell the other ranks of `error`, and return the error to raise."""

    def report_death(self, rank: int, how: str) -> None:
        """Tell all ranks that a process has ended without an exception."""


_agreed_status: int | None = None


def agree_on_exit(status: int | None) -> None:
    """Let all processes exit with `status` after the present run, though one may do so much later than another."""
    global _agreed_status
    _agreed_status = status


def agreed_status() -> int | None:
    """Return the status with which all ranks have agreed to exit after the present run; `None` if they have not."""
    return _agreed_status


def end_with_error() -> None:
    """End this process with status 1, without functions that are registered for its exit."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


class CheckedSubprocessLauncher(SubprocessScriptLauncher):
    """Starts a process for every other local rank by running the user's script again.

    In contrast to Lightning's launcher, it does not kill this process when another one has failed: this process reports
    the error, and may save a checkpoint together with the other ranks.

    Args:
        cluster_environment, num_processes, num_nodes: as in Lightning's launcher.
        check: a function called with the Trainer before any process is started. It raises an error if the run would
            fail in every process.
        run: reports errors to the other ranks.
    """

    _children: ClassVar[Children | None] = None
    """The processes that this process has started. They outlive the Trainer that did so."""
    _has_failed: ClassVar[bool] = False
    """Whether the last run of this process failed, whichever Trainer launched it."""
    _may_be_handled: ClassVar[bool] = False
    """Whether the user's code may have handled the error of that run, on this rank and on the others."""
    _current: "ClassVar[CheckedSubprocessLauncher | None]" = None
    """While a run with several local ranks is launched, its launcher."""
    _num_runs_before = 0

    def __init__(
        self,
        cluster_environment: ClusterEnvironment,
        num_processes: int,
        num_nodes: int,
        check: Callable[[Trainer], None] | None = None,
        run: LaunchedRun | None = None,
    ) -> None:
        super().__init__(cluster_environment, num_processes, num_nodes)
        self._check = check
        self._run = run

    @property
    def is_interactive_compatible(self) -> bool:
        """Whether the launcher works in a notebook: it does if it starts no process."""
        return self.num_processes == 1 or self.cluster_environment.creates_processes_externally

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        """Start the other local ranks, then call `function` in this one.

        Raises:
            ConfigurationError: MASTER_PORT is in use on the node of rank 0, or options do not fit the module.
            RankFailedError: another rank failed.
        """
        environment = self.cluster_environment
        if not environment.creates_processes_externally and environment.node_rank() == 0:
            if not serves_store(environment.main_port):
                check_port_is_free(environment)
            if trainer is not None and self._check is not None:
                self._check(trainer)
        _end_with_parent()
        self._num_runs_before = self._num_runs
        CheckedSubprocessLauncher._has_failed = False
        if self.num_processes > 1:  # not a run of rank 0 alone, during which the other processes may end
            CheckedSubprocessLauncher._current = self
        agree_on_exit(None)
        try:
            return super().launch(function, *args, trainer=trainer, **kwargs)
        except TunerExit:
            raise  # the end of a search for a learning rate or a batch size
        except BaseException as error:
            CheckedSubprocessLauncher._has_failed = True
            # Ranks that had joined know of the failure. Others would wait until the timeout.
            CheckedSubprocessLauncher._may_be_handled = isinstance(error, Exception) and self.has_joined
            raised = self._report(error)
            if raised is error:
                raise
            raise raised from raised.__cause__
        finally:
            CheckedSubprocessLauncher._current = None

    def _report(self, error: BaseException) -> BaseException:
        """Tell the other ranks of `error`, and return the error to raise."""
        if self._run is None:
            return error
        try:
            return self._run.report_failure(error)
        except Exception as later:  # of a signal handler: torch's raises the true cause if a loader's worker was killed
            with suppress(Exception):
                return self._run.report_failure(later)
            return error

    def kill(self, signum: Any) -> None:
        """Send the signal `signum` to the processes that this launcher started."""
        super().kill(signum)
        if self._children is not None:
            self._children.send(signum)

    def start_others(self, start: Callable[[], None]) -> None:
        """Start the other local ranks, and watch them in place of Lightning's observer."""
        os.environ[_PARENT_VARIABLE] = str(os.getpid())
        try:
            start()
        finally:
            del os.environ[_PARENT_VARIABLE]
        if not self.procs:
            return
        # Lightning's observer is given an empty list: it would kill this process as soon as another one fails.
        first = self.cluster_environment.node_rank() * self.num_processes + 1
        CheckedSubprocessLauncher._children = Children(dict(enumerate(self.procs, first)), _on_end)
        self.procs = []
        _finish_at_exit()

    @property
    def is_in_run(self) -> bool:
        """Whether the ranks have joined the run that is launched, and it has not ended."""
        return self._run is not None and self._run.is_in_run

    @property
    def has_joined(self) -> bool:
        """Whether the ranks have joined the run that is launched."""
        return self._num_runs > self._num_runs_before

    @property
    def _num_runs(self) -> int:
        return 0 if self._run is None else self._run.num_runs


@cache
def _finish_at_exit() -> None:
    """Finish once when this process exits. A method would keep the launcher, and with it the module, in memory."""
    atexit.register(_finish)


def _finish() -> None:
    """Wait for the other processes when this one exits; exit with status 1 if one of them failed.

    If this process exits with the error of a run, do not wait longer than some seconds.
    """
    children, has_failed = CheckedSubprocessLauncher._children, CheckedSubprocessLauncher._has_failed
    assert children is not None
    has_printed_error = getattr(sys, "last_value", None) is not None
    may_be_handled = CheckedSubprocessLauncher._may_be_handled or agreed_status() is not None
    if has_failed and (has_printed_error or not may_be_handled):
        children.end(_GRACE_SECONDS)
        return
    children.stop_watching()
    children.wait()
    failed = {rank: status for rank, status in children.statuses().items() if status not in (0, agreed_status())}
    if failed:
        rank, status = next(iter(failed.items()))
        if status < 0 or not has_failed or agreed_status() is not None:  # else its error is that of the run
            sys.stderr.write(f"Rank {rank} failed after the run: {describe_status(status)}. Its error is above.\n")
        end_with_error()


def _on_end(rank: int, status: int) -> None:
    """End this process if that of `rank` failed outside of a run, where no collective and no watcher notices it.

    After a run, a process may end with status 0 while this one still runs hooks, or uploads logs.
    """
    launcher = CheckedSubprocessLauncher
    if status in (0, agreed_status()) and (launcher._current is None or launcher._current.has_joined):
        return
    deadline = time.monotonic() + _GRACE_SECONDS
    while time.monotonic() < deadline:
        if launcher._current is not None and launcher._current._run is not None and launcher._current.is_in_run:
            launcher._current._run.report_death(rank, describe_status(status))
            return
        if launcher._has_failed:
            return
        time.sleep(0.1)
    sys.stderr.write(f"Rank {rank} ended outside of a run: {describe_status(status)}. All ranks end.\n")
    sys.stderr.flush()
    assert launcher._children is not None
    launcher._children.end(0.0)
    os._exit(1)


def _end_with_parent() -> None:
    """If a launcher started this process, end it some seconds after the launcher's process has ended."""
    parent = os.environ.pop(_PARENT_VARIABLE, None)
    if parent is not None:
        thread = threading.Thread(target=_watch_parent, args=(int(parent),), name="lightning_paral_parent", daemon=True)
        thread.start()


def _watch_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    time.sleep(_GRACE_SECONDS + 1.0)  # time to notice it in the run, and to tear down
    sys.stderr.write("The process that started this rank has ended. Ending this rank.\n")
    sys.stderr.flush()
    os._exit(1)
