"""Run a function in processes of `multiprocessing`, one per rank, and raise the error of the rank that failed first."""

import multiprocessing
import os
import pickle
import signal
import time
import warnings
from collections.abc import Callable, Iterable
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import Any, Literal

from lightning_paral.distributed.launching.children import describe_status
from lightning_paral.distributed.launching.rank_main import FORWARDED, RankError, run_in_rank
from lightning_paral.errors import ConfigurationError, RankFailedError

GRACE_SECONDS = 10.0
"""How long the other ranks have after the first failure to report their errors, not counting the time of a save."""

_NO_MAIN_GUARD_STATUS = 83


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
            target=run_in_rank, args=(rank, parent, theirs, target, arguments), name=f"rank {rank}"
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
            ready = wait(list(self._connections.values()), timeout=min(1.0, deadline - time.monotonic()))
            for rank, connection in list(self._connections.items()):
                # Processes that a rank has forked keep its end of the connection open after it has died.
                if connection in ready or not (self._processes[rank].is_alive() or connection.poll()):
                    self._receive(rank)
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
            report = pickle.loads(connection.recv_bytes()) if connection.poll() else None
        except (EOFError, OSError):  # the connection was closed, in the middle of the report if it is an OSError
            report = None
        if report is None:
            process.join(GRACE_SECONDS)
            error = self._describe_death(rank, process.exitcode)
            report = False, RankError(rank=rank, error=error, seconds=seconds)
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
        hint = "" if self.method == "fork" or (status or 0) < 0 else (
            f" If an error about an attribute of '__main__' is above: start_method={self.method!r} cannot send classes "
            "that are defined in a notebook. Put them into a file, or set start_method='fork'."
        )  # fmt: skip
        return RankFailedError(f"Rank {rank} died without an error: {describe_status(status or 0)}.{hint}")

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
            for name in FORWARDED:
                if hasattr(signal, name):
                    signum = getattr(signal, name)
                    self._before[signum] = signal.signal(signum, lambda signum, _: self._processes.send(signum))

    def __exit__(self, *_: object) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, signal.SIG_DFL if handler is None else handler)  # None: it was set in C
