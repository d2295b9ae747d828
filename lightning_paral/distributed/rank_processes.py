"""Run a function in processes of `multiprocessing`, one per rank, and raise the error of the rank that failed first."""

import ctypes
import multiprocessing
import os
import pickle
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, Literal

from lightning_paral.distributed.user_frames import library_of
from lightning_paral.errors import ConfigurationError, RankFailedError

GRACE_SECONDS = 10.0
"""How long the other ranks have after the first failure to report their errors, not counting the time of a save."""

_FAILED_AT = "lightning_paral_failed_at"
_NO_MAIN_GUARD_STATUS = 83
_PR_SET_PDEATHSIG = 1  # of Linux's prctl
_FORWARDED = ("SIGTERM", "SIGUSR1", "SIGUSR2")


@dataclass(frozen=True, kw_only=True)
class RankError:
    """The error with which a rank ended."""

    rank: int
    error: BaseException
    seconds: float
    """When it ended, on the monotonic clock of the node."""
    has_died: bool = False
    """Whether the process ended without an exception."""

    @property
    def is_consequence(self) -> bool:
        """Whether another rank failed first."""
        return isinstance(self.error, RankFailedError) and not self.has_died


def run_ranks(
    target: Callable[..., Any],
    arguments: tuple[Any, ...],
    *,
    ranks: Iterable[int],
    method: Literal["spawn", "fork", "forkserver"],
    on_start: Callable[["RankProcesses"], None],
) -> Any:
    """Call `target(rank, *arguments)` in a process per rank, and return what the first rank returned.

    Args:
        target: a function; with `"spawn"` and `"forkserver"`, it and `arguments` are pickled.
        arguments: further arguments of `target`.
        ranks: the numbers of the ranks.
        method: the start method of `multiprocessing`.
        on_start: called with the processes after they have started.

    Raises:
        BaseException: the error of the rank that failed first, with its traceback as a note.
        ConfigurationError: the arguments cannot be pickled, or the script has no main guard.
        RankFailedError: a process died without an error.
    """
    processes = RankProcesses(method)
    try:
        with _Forwarding(processes):
            for rank in ranks:
                processes.start(rank, target, arguments)
            on_start(processes)
            return processes.collect()
    except KeyboardInterrupt:
        processes.send(signal.SIGINT)
        processes.join(GRACE_SECONDS)
        raise
    finally:
        processes.end()


_parent: Connection | None = None
"""In the process of a rank, the connection to the process that started it."""


def tell_whether_saving(is_saving: bool) -> None:
    """Tell the process that started this rank, if it waits, that a save after a failure begins or has ended."""
    if _parent is not None:
        with suppress(OSError):
            _parent.send_bytes(pickle.dumps(is_saving))


@contextmanager
def noting_failure() -> Generator[None, None, None]:
    """Note when an error leaves this context. The teardown that follows takes longer on some ranks than on others."""
    try:
        yield
    except BaseException as error:
        with suppress(AttributeError):  # a class with slots
            setattr(error, _FAILED_AT, time.monotonic())
        raise


def check_main_guard() -> None:
    """End this process if it is a spawned rank that runs the script again, because the script has no main guard."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        os._exit(_NO_MAIN_GUARD_STATUS)


class RankProcesses:
    """The processes of the local ranks of one run, and what they reported."""

    def __init__(self, method: Literal["spawn", "fork", "forkserver"]) -> None:
        self.method = method
        self._context: Any = multiprocessing.get_context(method)
        self._processes: dict[int, Any] = {}
        self._connections: dict[int, Connection] = {}
        self._results: dict[int, Any] = {}
        self._errors: dict[int, RankError] = {}
        self._saving: set[int] = set()

    def start(self, rank: int, target: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        """Start the process of `rank`.

        Raises:
            ConfigurationError: the arguments cannot be pickled.
        """
        ours, theirs = self._context.Pipe(duplex=False)
        parent = os.getpid() if self.method != "forkserver" else None
        process = self._context.Process(
            target=_run_rank, args=(rank, parent, theirs, target, arguments), name=f"rank {rank}"
        )
        self._connections[rank] = ours
        try:
            with warnings.catch_warnings():
                # Python 3.12 warns about threads. `prepare_to_start` and `limit_threads` handle those of torch.
                warnings.filterwarnings("ignore", message=".*use of fork.*", category=DeprecationWarning)
                process.start()
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            if self.method == "fork":
                raise
            raise ConfigurationError(
                f"start_method={self.method!r} sends the Trainer, the module and the loaders to new processes, but "
                f"they cannot be pickled: {error}. Define classes and functions at the top level of a file, or set "
                "start_method='fork'."
            ) from error
        finally:
            theirs.close()
        self._processes[rank] = process

    def collect(self) -> Any:
        """Wait until all ranks have ended, and return the result of the first.

        Raises:
            BaseException: see `run_ranks`.
        """
        deadline = float("inf")
        while self._connections and time.monotonic() < deadline:
            for connection in wait(list(self._connections.values()), timeout=min(1.0, deadline - time.monotonic())):
                self._receive(next(rank for rank, each in self._connections.items() if each is connection))
            if self._errors and (deadline == float("inf") or self._saving & self._connections.keys()):
                deadline = time.monotonic() + GRACE_SECONDS
        if self._errors:
            raise self._first_cause()
        self.join(GRACE_SECONDS)
        return next(iter(self._results.values()))

    def send(self, signum: int) -> None:
        """Send a signal to the ranks that are running."""
        for process in self._processes.values():
            with suppress(ProcessLookupError):
                if process.pid is not None and process.is_alive():
                    os.kill(process.pid, signum)

    def join(self, seconds: float) -> None:
        """Wait until all processes have ended, for at most `seconds`."""
        deadline = time.monotonic() + seconds
        for process in self._processes.values():
            process.join(max(0.0, deadline - time.monotonic()))

    def end(self) -> None:
        """End the processes that are running."""
        for process in self._processes.values():
            if process.is_alive():
                process.terminate()
        self.join(1.0)
        for process in self._processes.values():
            if process.is_alive():
                process.kill()
        self.join(10.0)
        for connection in self._connections.values():
            connection.close()

    def _receive(self, rank: int) -> None:
        """Read what `rank` reported, or find out how it died."""
        connection, process, seconds = self._connections[rank], self._processes[rank], time.monotonic()
        try:
            report = pickle.loads(connection.recv_bytes())
        except EOFError:
            process.join(GRACE_SECONDS)
            error = self._describe_death(rank, process.exitcode)
            report = False, RankError(rank=rank, error=error, seconds=seconds, has_died=True)
        if isinstance(report, bool):
            (self._saving.add if report else self._saving.discard)(rank)
            return
        self._connections.pop(rank).close()
        succeeded, outcome = report
        (self._results if succeeded else self._errors)[rank] = outcome

    def _describe_death(self, rank: int, status: int | None) -> BaseException:
        if status == _NO_MAIN_GUARD_STATUS:
            return ConfigurationError(
                f"start_method={self.method!r} imports the script in every rank, and the script starts a run when it "
                'is imported. Put the code that starts it under `if __name__ == "__main__":`, or set '
                "start_method='popen', or 'fork'."
            )
        if status is not None and status < 0:
            name = signal.Signals(-status).name if -status in set(signal.Signals) else f"signal {-status}"
            memory = ", which Linux sends if memory runs out" if name == "SIGKILL" else ""
            return RankFailedError(f"Rank {rank} died: its process was killed by {name}{memory}.")
        hint = "" if self.method == "fork" else (
            f" If an error about an attribute of '__main__' is above: start_method={self.method!r} cannot send classes "
            "that are defined in a notebook. Put them into a file, or set start_method='fork'."
        )  # fmt: skip
        return RankFailedError(f"Rank {rank} died: its process exited with status {status}.{hint}")

    def _first_cause(self) -> BaseException:
        """Return the error of the rank that failed first."""
        causes = [each for each in self._errors.values() if not each.is_consequence]
        return min(causes or self._errors.values(), key=lambda each: each.seconds).error


class _Forwarding:
    """A context in which signals for this process are sent to the ranks instead, which can react to them."""

    def __init__(self, processes: RankProcesses) -> None:
        self._processes = processes
        self._before: dict[int, Any] = {}

    def __enter__(self) -> None:
        with suppress(ValueError):  # this is not the main thread
            for name in _FORWARDED:
                if hasattr(signal, name):
                    signum = getattr(signal, name)
                    self._before[signum] = signal.signal(signum, lambda signum, _: self._processes.send(signum))

    def __exit__(self, *_: object) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)


def _run_rank(
    rank: int, parent: int | None, connection: Connection, target: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    """Call `target` in the process of `rank`, and report what it returns or raises."""
    global _parent
    _parent = connection
    _end_with(parent)
    for name in _FORWARDED:
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_DFL)  # not the handlers of the parent
    status = 0
    try:
        report: tuple[bool, Any] = True, target(rank, *arguments)
    except BaseException as error:
        seconds = getattr(error, _FAILED_AT, time.monotonic())
        report, status = (False, RankError(rank=rank, error=_portable(error, rank), seconds=seconds)), 1
    connection.send_bytes(pickle.dumps(report))
    connection.close()
    if status:
        sys.exit(status)


def _end_with(parent: int | None) -> None:
    """Let the kernel kill this process if its parent dies, so that no rank is left behind.

    Args:
        parent: the process that starts the ranks; `None` if a fork server is the parent, which ends with that process.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if parent is not None and os.getppid() != parent:
            os._exit(1)  # the parent died before the kernel was told


def _portable(error: BaseException, rank: int) -> BaseException:
    """Return `error`, or a substitute if it cannot be pickled, with its traceback on `rank` as a note."""
    if isinstance(error, SystemExit):
        error = SystemExit(error.code or 1)  # the run ended early, also if the status was 0
    note = f"It was raised on rank {rank}:\n{''.join(_user_lines(error)).rstrip()}"
    try:
        copy = pickle.loads(pickle.dumps(error))
    except Exception:
        copy = RankFailedError(f"Rank {rank} failed: {''.join(traceback.format_exception_only(error)).strip()}")
    notes = getattr(error, "__notes__", [])
    copy.__notes__ = [*notes, note]
    return copy if isinstance(copy, BaseException) else RankFailedError(note)


def _user_lines(error: BaseException) -> Iterable[str]:
    """Return the lines of the user's own code in the traceback of `error` and of its causes; all lines if none is."""
    described = traceback.TracebackException.from_exception(error)
    each: traceback.TracebackException | None = described
    while each is not None and os.environ.get("PARAL_TRACEBACK") != "full":
        own = [frame for frame in each.stack if not library_of(frame.filename)]
        each.stack = traceback.StackSummary.from_list(own or each.stack)
        each = each.__cause__ or (None if each.__suppress_context__ else each.__context__)
    has_cause = described.__cause__ is not None or described.__context__ is not None
    return described.format() if has_cause else described.stack.format()
