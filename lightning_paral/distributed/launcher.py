"""Start the other local ranks by running the script again, notice how they end, and leave none behind."""

import atexit
import ctypes
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from lightning.fabric.plugins import ClusterEnvironment
from lightning.pytorch import Trainer

from lightning_paral.compat.lightning.strategies import SubprocessScriptLauncher, TunerExit
from lightning_paral.distributed.process_group import check_port_is_free, serves_store

_LAUNCHED_BY = "LIGHTNING_PARAL_LAUNCHED_BY"
"""In a launched process, the environment variable with the id of the launcher's process, and a folder."""
_POLL_SECONDS = 0.1
_GRACE_SECONDS = 3.0
"""How long a process may take to report its own error, after another one has ended."""
_LEAVE_SECONDS = 60.0
"""How long a process may take for its hooks, after all have agreed on a status."""

_PR_SET_PDEATHSIG = 1  # of Linux's prctl

_agreed_status: int | None = None


class LaunchedRun(Protocol):
    """What the launcher has to know about the run that it launches: the watch of the strategy."""

    @property
    def is_in_run(self) -> bool:
        """Whether the ranks have joined, and the run has not ended."""

    def report_failure(self, error: BaseException) -> BaseException:
        """Tell the other ranks of `error`, and return the error to raise."""

    def report_death(self, rank: int, how: str) -> None:
        """End the run on all ranks, because the process of `rank` has ended. May be called in any thread.

        Args:
            rank: the global rank.
            how: a clause, such as `"its process exited with status 3"`.
        """


class ScriptLauncher(SubprocessScriptLauncher):
    """Starts a process for every other local rank by running the user's script again.

    Lightning's launcher kills this process as soon as another one has failed. This one lets the run end with its cause:
    it polls the processes, and reports one that ends badly to the run.

    Args:
        cluster_environment, num_processes, num_nodes: as in Lightning's launcher.
        run: returns what learns of errors, and of processes that have ended.
    """

    def __init__(
        self,
        cluster_environment: ClusterEnvironment,
        num_processes: int,
        num_nodes: int,
        run: Callable[[], LaunchedRun] | None = None,
    ) -> None:
        super().__init__(cluster_environment, num_processes, num_nodes)
        self._run = run

    @property
    def is_interactive_compatible(self) -> bool:
        """Whether the launcher works in a notebook: it does if it starts no process."""
        return self.num_processes == 1 or self.cluster_environment.creates_processes_externally

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        """Start the other local ranks, then call `function` in this one.

        Raises:
            ConfigurationError: MASTER_PORT is in use on the node of rank 0.
            RankFailedError: another rank failed.
        """
        environment = self.cluster_environment
        is_first_node = not environment.creates_processes_externally and environment.node_rank() == 0
        if is_first_node and not serves_store(environment.main_port):
            check_port_is_free(environment)
        _follow_launcher()
        _calls.begin(None if self.num_processes == 1 else self._run)  # if alone, other processes may end meanwhile
        try:
            result = super().launch(function, *args, trainer=trainer, **kwargs)
        except TunerExit:  # the end of a search for a learning rate or a batch size
            _calls.end()
            raise
        except BaseException as error:
            raised = self._report(error)
            _calls.end(error)
            if raised is error:
                raise
            raise raised from raised.__cause__
        _calls.end()
        return result

    def _report(self, error: BaseException) -> BaseException:
        """Tell the other ranks of `error`, and return the error to raise."""
        if self._run is None:
            return error
        try:
            return self._run().report_failure(error)
        except BaseException as later:  # of a signal handler: torch's raises the cause if a loader's worker was killed
            with suppress(BaseException):
                return self._run().report_failure(later)
            return error

    def start_others(self, start: Callable[[], None]) -> None:
        """Start the other local ranks, and poll them in place of Lightning's observer.

        Without others, set no variable: a later Trainer with several devices would wait for ranks that another launcher
        seems to have started.
        """
        global _children
        if self.num_processes == 1:
            return
        folder = tempfile.mkdtemp(prefix="lightning_paral-")
        os.environ[_LAUNCHED_BY] = f"{os.getpid()}:{folder}"
        try:
            start()
        finally:
            del os.environ[_LAUNCHED_BY]
        first = self.cluster_environment.node_rank() * self.num_processes + 1
        _children = _Children(dict(enumerate(self.procs, first)), Path(folder))
        self.procs = []  # Lightning's observer polls these

    def kill(self, signum: Any) -> None:
        """Send the signal `signum` to the processes that this process has started."""
        if _children is not None:
            for process in _children.processes.values():
                process.send_signal(signum)


def agree_on_exit(status: int) -> None:
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


def end_with_parent() -> None:
    """Make the kernel kill this process when the one that started it ends; on Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # torch's SIGINT does not end code in C


def describe_status(status: int) -> str:
    """Return how a process with this exit status ended, such as `its process was killed by SIGKILL`."""
    if status >= 0:
        return f"its process exited with status {status}"
    name = signal.Signals(-status).name if -status in {each.value for each in signal.Signals} else f"signal {-status}"
    memory = ", which Linux sends if memory runs out" if name == "SIGKILL" else ""
    return f"its process was killed by {name}{memory}"


class _Calls:
    """How many calls of Trainers with several local ranks this process has begun and left: an odd number inside of one.

    A launched process writes the number to a file: if it ends with status 0, the launcher reads whether it was in a
    call, as after `os._exit(0)`, or has left out one.
    """

    def __init__(self) -> None:
        self.count = 0
        self.run: Callable[[], LaunchedRun] | None = None
        """During a call, returns the run."""
        self.error: BaseException | None = None
        """The error of the last call."""
        self.file: Path | None = None
        """In a launched process, the file for the number."""

    def begin(self, run: Callable[[], LaunchedRun] | None) -> None:
        global _agreed_status
        self.run, self.error, _agreed_status = run, None, None
        if run is not None:
            self._write(self.count + 1 + self.count % 2)

    def end(self, error: BaseException | None = None) -> None:
        if self.run is not None and (error is None or isinstance(error, Exception)):  # `sys.exit` is not a way out
            self._write(self.count + 1)
        self.run, self.error = None, error

    def _write(self, count: int) -> None:
        self.count = count
        if self.file is not None:
            with suppress(OSError):  # the launcher has ended
                self.file.write_text(str(count))


class _Children:
    """The processes of the other local ranks by global rank, which outlive the Trainer that has started them."""

    def __init__(self, processes: "dict[int, subprocess.Popen[Any]]", folder: Path) -> None:
        self.processes, self._folder = processes, folder
        self._is_exiting = False
        if processes:
            atexit.register(self._finish)
            threading.Thread(target=self._poll, name="lightning_paral_children", daemon=True).start()

    def _poll(self) -> None:
        running = dict(self.processes)
        while running and not self._is_exiting:
            for rank, process in list(running.items()):
                if process.poll() is not None and not self._is_exiting:
                    del running[rank]
                    if not self._ended_well(rank):
                        self._report(rank)
            time.sleep(_POLL_SECONDS)

    def _report(self, rank: int) -> None:
        """Report the end of the process of `rank` to the run. Outside of a run, end all processes."""
        how = describe_status(self.processes[rank].returncode)
        deadline = time.monotonic() + _GRACE_SECONDS
        while time.monotonic() < deadline:
            run = _calls.run
            if run is not None and run().is_in_run:
                run().report_death(rank, how)
                return
            if _calls.error is not None or self._is_exiting:
                return  # this process ends as well, or handles the error
            time.sleep(_POLL_SECONDS)
        sys.stderr.write(f"Rank {rank} ended outside of a run: {how}. All ranks end.\n")
        self._end()
        end_with_error()

    def _ended_well(self, rank: int) -> bool:
        """Return whether the process of `rank` ended with status 0, or as agreed, and outside of a call."""
        status, count = self.processes[rank].returncode, self._count_of(rank)
        return status == _agreed_status or (status == 0 and count % 2 == 0 and count >= _calls.count)

    def _count_of(self, rank: int) -> int:
        with suppress(OSError, ValueError):  # it has not called a Trainer
            return int((self._folder / str(rank - min(self.processes) + 1)).read_text())
        return 0

    def _finish(self) -> None:
        """Wait for the other processes when this one exits; exit with status 1 if one of them failed.

        Those in a call that this process does not make, or with whose error this process exits, have some seconds.
        """
        self._is_exiting = True
        error = _calls.error
        is_uncaught = getattr(sys, "last_value", None) is not None  # Python has printed it
        gives_up = _agreed_status is None and (is_uncaught or (error is not None and not isinstance(error, Exception)))
        deadline = time.monotonic() + (_GRACE_SECONDS if _agreed_status is None else _LEAVE_SECONDS)
        while running := [rank for rank, process in self.processes.items() if process.poll() is None]:
            if time.monotonic() > deadline and (gives_up or any(map(self._waits_in_vain, running))):
                self._end()
            time.sleep(_POLL_SECONDS)
        failed = [rank for rank in self.processes if not self._ended_well(rank)]
        shutil.rmtree(self._folder, ignore_errors=True)
        if failed and not gives_up:
            how = describe_status(self.processes[failed[0]].returncode)
            sys.stderr.write(f"Rank {failed[0]} failed: {how}. If it raised an error, the error is above.\n")
            end_with_error()

    def _waits_in_vain(self, rank: int) -> bool:
        count = self._count_of(rank)
        return count % 2 == 1 and (count > _calls.count or _calls.error is not None)

    def _end(self) -> None:
        """Terminate the processes, and kill those that remain a second later."""
        for end in (subprocess.Popen.terminate, subprocess.Popen.kill):
            for process in self.processes.values():
                end(process)  # does nothing if it has ended
            deadline = time.monotonic() + 1.0
            for process in self.processes.values():
                with suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=max(0.1, deadline - time.monotonic()))


_calls = _Calls()
_children: _Children | None = None


@cache
def _follow_launcher() -> None:
    """If a launcher started this process, tell it of calls, and end this process some seconds after the launcher."""
    launched_by = os.environ.pop(_LAUNCHED_BY, None)
    if launched_by is not None:
        launcher, _, folder = launched_by.partition(":")
        _calls.file = Path(folder, os.environ["LOCAL_RANK"])
        thread = threading.Thread(target=_watch_launcher, args=(int(launcher),), daemon=True)
        thread.name = "lightning_paral_launcher"
        thread.start()


def _watch_launcher(launcher: int) -> None:
    # The kernel's signal for it would come when the thread that called the Trainer ends.
    while os.getppid() == launcher:
        time.sleep(0.5)
    time.sleep(_GRACE_SECONDS + 1.0)  # time to notice it in the run, and to tear down
    sys.stderr.write("The process that started this rank has ended. Ending this rank.\n")
    sys.stderr.flush()
    os._exit(1)
