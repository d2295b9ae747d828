"""The first failure of a run: how all ranks learn of it, end soon, and print it last.

The rank that fails writes the cause to the store before anything else. The watcher of every rank reads it. If the main
thread does not leave the run by itself, the watcher aborts its collectives, then interrupts its Python code, and ends
the process after `END_SECONDS`. The launcher, torchrun or SLURM notices a process that dies without an exception.
"""

import json
import math
import multiprocessing
import os
import re
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from types import FrameType
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store
from torch.distributed.elastic.multiprocessing.errors import get_error_handler
from torch.optim import Optimizer

from lightning_paral.compat.torch.process_groups import abort_nccl, store_port
from lightning_paral.distributed.watcher import POLL_SECONDS, RankWatcher, SignalHandler, handler_of, wait_until
from lightning_paral.errors import RankFailedError

END_SECONDS = 3.0
"""How long a rank may take to leave the run after any rank has failed; then its process is ended. For as long, ranks
wait for each other: to save, and until the failed rank has printed its error."""
_ALONE_SECONDS = 0.5
"""How long a rank may take to leave the run by itself, because all ranks may have raised the same error."""
_ANSWER_SECONDS = 4 * POLL_SECONDS
"""How long the watcher of a rank that lives may take to answer."""
LEAVE_SECONDS = 60.0
"""How long hooks and the teardown may take once a rank has left the run, not counting a save."""

_INTERRUPTED = re.compile(
    "Connection (closed by peer|was likely closed|reset by peer)|Broken pipe|Socket closed|Failed to (recv|send)|"
    "NCCL communicator was aborted|ncclRemoteError|ncclSystemError"
)
_TRACEBACK_OF_WORKER = re.compile(r"Original Traceback \(most recent call last\):\n(?:  .*\n)*")
"""What torch puts into the messages of errors of loader workers."""
_UNREACHABLE = (dist.DistError, RuntimeError)
"""What a store raises if the process that serves it has ended."""
_SIGNUM: Any = signal.SIGRTMIN + 7 if hasattr(signal, "SIGRTMIN") else None
"""The signal that interrupts the main thread, also while it sleeps or waits."""


class InterruptedByFailure(BaseException):
    """Raised in Python code of the main thread when another rank has failed; reported as a `RankFailedError`.

    It is not an `Exception`, so that code which catches errors of a batch or of an import does not catch it.
    """


@dataclass(frozen=True, kw_only=True)
class Failure:
    """The end of a run on one rank: an error, or the death of the process."""

    rank: int
    node: str = ""
    """The name of the rank's node; empty if it is unknown."""
    error: str
    """The type and message of the error, such as `ValueError: my bug`, or how the process ended."""
    where: str = ""
    """The part of the run, such as `training step 3 of fit`; empty if it is unknown."""
    traceback: str = ""
    """The formatted traceback; empty if no exception was raised."""
    has_died: bool = False
    """Whether the process ended without an exception, so that it can neither print nor save."""

    def __str__(self) -> str:
        """Return one line, such as `rank 1 (node-a) failed in training step 3 of fit: ValueError: my bug`."""
        node = f" ({self.node})" if self.node else ""
        where = f" in {self.where}" if self.where else ""
        return f"rank {self.rank}{node} {'died' if self.has_died else 'failed'}{where}: {self.error}"


def failure_of(error: BaseException, rank: int, where: str) -> Failure:
    """Return the failure that `error` means on this rank."""
    message = _TRACEBACK_OF_WORKER.sub("", "".join(traceback.format_exception_only(error)))
    trace = "".join(traceback.format_exception(error)) if error.__traceback__ is not None else ""
    return Failure(rank=rank, node=socket.gethostname(), error=" ".join(message.split()), where=where, traceback=trace)


def is_interruption(error: BaseException | None) -> bool:
    """Return whether `error`, or an error that led to it, says that another rank left a collective."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, InterruptedByFailure | RankFailedError | dist.DistNetworkError):
            return True
        # not `str`, which the class of a user's error may not implement
        if isinstance(error, RuntimeError) and _INTERRUPTED.search("".join(traceback.format_exception_only(error))):
            return True
        error = error.__cause__ or error.__context__
    return False


def as_consequence(error: BaseException, why: str) -> BaseException:
    """Return a `RankFailedError` with the message `why` if another rank interrupted this one, otherwise `error`.

    Args:
        error: an error that ended the run on this rank.
        why: names the failure of the other rank; empty if no other rank has failed.
    """
    if not why or not is_interruption(error):
        return error
    consequence = RankFailedError(why)
    consequence.__cause__ = error
    return consequence


def describe_exit(error: BaseException, rank: int, where: str) -> str:
    """Return a line about `sys.exit` or Ctrl-C, for which Python prints none. Let `sys.exit(0)` exit with status 1.

    Args:
        error: the error that ends the run on this rank.
        rank: this rank.
        where: the part of the run.
    """
    what, advice = f"ended by {type(error).__name__}", ""
    if isinstance(error, SystemExit):
        what = f"called sys.exit({'' if error.code is None else repr(error.code)})"
        status = "" if error.code else " The exit status is 1, because other ranks may not have called it."
        advice = f"{status} To end a run early, set trainer.should_stop = True on all ranks."
        error.code = error.code or 1
    file, line = traceback.extract_tb(error.__traceback__)[-1][:2]
    return f"Rank {rank} {what} in {where}, at {file}:{line}.{advice}\n"


def mark_as_told(error: BaseException) -> None:
    """Mark `error` as one that another rank raised and this one only repeats."""
    error.__dict__["paral_is_told"] = True


def is_told(error: BaseException) -> bool:
    """Return whether `error` repeats the error of another rank, so that its traceback does not show the cause."""
    return hasattr(error, "paral_is_told")


class FirstFailure:
    """The record in the store of the failure that ended a run. The first rank that writes it decides it for all.

    The methods may be called in any thread.

    Args:
        store: a store in a namespace of the run.
        rank: this process's rank.
        world_size: the number of ranks.
    """

    def __init__(self, store: Store, rank: int, world_size: int) -> None:
        self.store: Any = store
        self.rank, self.world_size = rank, world_size
        self.known: Failure | None = None
        """The failure, if this rank knows of one."""

    @property
    def is_own(self) -> bool:
        """Whether this rank failed first."""
        return self.known is not None and self.known.rank == self.rank

    def why_ended(self) -> str:
        """Return one line that says why this rank ends, once the failure is known."""
        assert self.known is not None
        if self.is_own:
            return f"Rank {self.rank} ended: {self.known.error}"
        return f"Rank {self.rank} ended because {self.known}"

    def why_interrupted(self) -> str:
        """Return the same line if another rank ended the run, or this process died; otherwise an empty string."""
        return "" if self.known is None or (self.is_own and not self.known.has_died) else self.why_ended()

    def report(self, failure: Failure) -> Failure:
        """Record `failure` unless another one was recorded before, and return the recorded one."""
        if self.known is None:
            try:
                found = self.store.compare_set("failure", "", json.dumps(asdict(failure)))
                self.known = Failure(**json.loads(found))
            except _UNREACHABLE:
                self.known = failure
        return self.known

    def check(self) -> Failure | None:
        """Return the failure that any rank has recorded; `None` if there is none.

        Raises:
            RuntimeError: the store cannot be reached, because the process that serves it has ended.
        """
        if self.known is None and self.store.check(["failure"]):
            self.known = Failure(**json.loads(self.store.get("failure")))
        return self.known

    def agree(self, key: str, value: str) -> bool:
        """Return whether all ranks call this with the same value, within `END_SECONDS`. An empty value is a no."""
        keys = [f"{key}/{rank}" for rank in range(self.world_size)]
        with suppress(*_UNREACHABLE):
            self.store.set(keys[self.rank], value)
            if value and wait_until(lambda: self.store.check(keys), END_SECONDS):
                return {self.store.get(each) for each in keys} == {value.encode()}
        return False

    def print_own(self, print_error: Callable[[], object]) -> None:
        """Call `print_error`, which prints the error of this rank, unless another rank has printed it."""
        is_printer = self._is_printer()
        (print_error if is_printer else partial(sys.stderr.write, f"{self.why_ended()}\n"))()
        sys.stderr.flush()
        if is_printer:
            with suppress(*_UNREACHABLE):
                self.store.set("printed", "")

    def print_after(self, line: str) -> None:
        """Print `line` once the failed rank has printed its error. If it does not, one of the others prints it."""
        assert self.known is not None
        trace = self.known.traceback
        with suppress(*_UNREACHABLE):  # rank 0, which served the store, has ended; the failed rank prints
            if trace and not wait_until(lambda: self.store.check(["printed"]), END_SECONDS) and self._is_printer():
                line = f"{trace}{line}"
        with suppress(OSError, ValueError):  # nobody reads stderr any more, or it is closed
            sys.stderr.write(f"{line}\n")
            sys.stderr.flush()

    def _is_printer(self) -> bool:
        try:
            return bool(self.store.compare_set("printer", "", str(self.rank)) == str(self.rank).encode())
        except _UNREACHABLE:
            return self.is_own

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle as `None`, because a connection belongs to one process."""
        return type(None), ()


def remember_first(error: BaseException, first: FirstFailure) -> None:
    """Attach `first` to the error that ends this rank, for the function that prints uncaught errors."""
    error.__dict__["paral_first_failure"] = first


def first_failure_of(error: BaseException) -> FirstFailure | None:
    """Return the first failure of the run that `error` ended on this rank; `None` if `error` ended no run."""
    first = getattr(error, "paral_first_failure", None)
    return first if isinstance(first, FirstFailure) else None


class FailureWatch:
    """A topic of the watcher: learns of the first failure of a run, and ends this rank's part in the run.

    Args:
        watcher: the watcher that polls this topic.
    """

    def __init__(self, watcher: RankWatcher) -> None:
        self.rank = watcher.rank
        self.first = FirstFailure(watcher.store, watcher.rank, watcher.world_size)
        self._watcher = watcher
        self._store_port = store_port()
        self._parent = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None
        self._learned_at = self._lost_at = 0.0
        self._left_at: float | None = None
        self._num_reactions = 0
        self._is_over = False
        self._asked_at = 0.0
        self._ignored: SignalHandler | None = None
        """From when this rank leaves the run, the handler of SIGTERM."""
        self._interrupter: SignalHandler | None = None
        """The handler of the signal, if this is the main thread and nothing else handles the signal."""
        in_main_thread = threading.current_thread() is threading.main_thread()
        if _SIGNUM is not None and in_main_thread and handler_of(_SIGNUM) == signal.SIG_DFL:
            self._interrupter = SignalHandler(_SIGNUM, self._interrupt)

    # Called by the main thread

    def report(self, error: BaseException, where: str, *, is_agreed: bool = False) -> BaseException:
        """Tell the other ranks that `error` ended the run on this one, unless another rank failed before.

        Call this while `error` is being handled.

        Args:
            error: the error.
            where: the part of the run.
            is_agreed: whether all ranks exit with the same status, so that `sys.exit(0)` is no mistake.

        Returns:
            BaseException: the error to raise: `error`, or a `RankFailedError` if it is a consequence of the failure of
                another rank.
        """
        self.leave()
        if is_interruption(error) or is_told(error):
            self._wait_for_cause()
        first = self.first.report(failure_of(error, self.rank, where))
        self._publish_endpoints()
        raised = as_consequence(error, self.first.why_interrupted())
        if raised is error and first.rank == self.rank:
            tell_torchrun(raised)
        remember_first(raised, self.first)
        if not isinstance(raised, Exception) and not is_agreed:
            told = describe_exit(raised, self.rank, where)
            if self.first.is_own:
                self.first.print_own(lambda: sys.stderr.write(told))
        return raised

    def _wait_for_cause(self) -> None:
        """Wait for the failure that interrupted this rank. If nobody reports one, find the ranks that have died."""
        try:
            self.first.store.set("who is there", "")
            if not wait_until(lambda: self.first.check() is not None, _ANSWER_SECONDS):
                self._report_dead()
        except _UNREACHABLE:
            self.first.report(self._end_of_store())

    def _report_dead(self) -> None:
        """Report the first rank that has not answered."""
        for rank in range(self.first.world_size):
            if rank != self.rank and not self.first.store.check([f"here/{rank}"]):
                self.report_death(rank, "its process ended without an exception")
                return

    def leave(self) -> None:
        """Do not interrupt the main thread from now on: it has left the run, and runs hooks and the teardown.

        Ignore SIGTERM until `end`: torchrun sends it as soon as one rank has ended, and Lightning's handler would
        broadcast to ranks that may be gone.
        """
        if self._ignored is None and threading.current_thread() is threading.main_thread():
            self._ignored = SignalHandler(signal.SIGTERM)
        self._left_at = time.monotonic()

    def begin_save(self) -> None:
        """Give a save after the failure the time that it takes, until the next call of `leave`."""
        self._left_at = math.inf

    def end(self) -> None:
        """End with the run, after the watcher has ended, and restore the handlers of signals."""
        if self.first.known is None:
            with suppress(*_UNREACHABLE):  # this rank has not died, though it does not answer any more
                self.first.store.set(f"here/{self.rank}", "")
                if self.rank == 0:
                    self.first.store.set("over", "")
        for handler in (self._interrupter, self._ignored):
            if handler is not None:
                handler.restore()

    # Called in any thread

    def ask_who_lives(self) -> None:
        """Report a rank that does not answer in a moment. torchrun sends SIGTERM also if a process has died."""
        with suppress(*_UNREACHABLE):
            self.first.store.set("who is there", "")
            self._asked_at = time.monotonic()

    def report_death(self, rank: int, how: str) -> None:
        """Tell all ranks that the process of `rank` ended without an exception, unless a failure is known.

        Args:
            rank: the global rank.
            how: how it ended, such as `its process was killed by SIGKILL`.
        """
        self.first.report(Failure(rank=rank, error=how, has_died=True))

    # Called by the watcher's thread

    def poll(self, store: Store) -> None:
        """Learn of a failure, and react to it."""
        if self._parent is not None and os.getppid() != self._parent:
            self.first.report(self._end_of_store())
        try:
            self.first.check()
            self._answer(store)
            self._lost_at = 0.0
            if self._asked_at and time.monotonic() - self._asked_at > _ANSWER_SECONDS:
                self._asked_at = 0.0
                self._report_dead()
        except _UNREACHABLE:
            self._lost_at = self._lost_at or time.monotonic()
            if time.monotonic() - self._lost_at > END_SECONDS and not self._is_over:
                self.first.report(self._end_of_store())
        if self.first.known is not None:
            self._react()

    def _answer(self, store: Any) -> None:
        if store.check(["who is there"]):
            store.set(f"here/{self.rank}", "")
        self._is_over = self._is_over or bool(store.check(["over"]))

    def _end_of_store(self) -> Failure:
        """Return the death of the process that serves the store: rank 0 or torchrun."""
        if self._parent is not None:
            error = "the process that started this rank has ended"
            return Failure(rank=self.rank, node=socket.gethostname(), error=error, has_died=True)
        return Failure(rank=0, error="its process ended without an exception", has_died=True)

    def _react(self) -> None:
        now = time.monotonic()
        if not self._learned_at:
            self._learned_at = now
            self._watcher.hurry()
        if self._left_at is not None:
            if now - self._left_at > LEAVE_SECONDS:
                self._end_process()
        elif now - self._learned_at > END_SECONDS:
            self._end_process()
        elif now - self._learned_at > _ALONE_SECONDS:
            self._num_reactions += 1
            if self._num_reactions == 1:  # in a thread, because NCCL may wait for kernels that never end
                threading.Thread(target=abort_nccl, name="lightning_paral_abort", daemon=True).start()
            self._publish_endpoints()
            close_connections(self._endpoints_of_others(), self._store_port)
            if self._num_reactions > 1 and self._interrupter is not None and not self._interrupter.is_restored:
                with suppress(OSError):
                    signal.pthread_kill(self._watcher.main_thread, _SIGNUM)

    def _publish_endpoints(self) -> None:
        """Tell the other ranks which connections are those of this rank, so that they close no others; once."""
        with suppress(*_UNREACHABLE):
            self.first.store.compare_set(f"endpoints/{self.rank}", "", json.dumps(own_endpoints(self._store_port)))

    def _endpoints_of_others(self) -> set[str]:
        keys = [f"endpoints/{rank}" for rank in range(self.first.world_size) if rank != self.rank]
        with suppress(*_UNREACHABLE):
            return {
                each for key in keys if self.first.store.check([key]) for each in json.loads(self.first.store.get(key))
            }
        return set()

    def _interrupt(self, signum: int, frame: FrameType | None) -> None:
        """Raise an error in the main thread, unless it has left the run or is in the middle of an optimizer's step."""
        if self.first.known is not None and not self.has_left and not _changes_weights(frame):
            raise InterruptedByFailure(self.first.why_ended())

    @property
    def has_left(self) -> bool:
        """Whether the main thread has left the run."""
        return self._left_at is not None

    def _end_process(self) -> None:
        """End this process without a teardown, which its main thread does not reach."""
        had_left, first = self.has_left, self.first
        assert first.known is not None
        if first.is_own:
            told = f"{first.known.traceback}{first.why_ended()}\n"
            first.print_own(lambda: sys.stderr.write(told))
        else:
            first.print_after(first.why_ended())
        if self.has_left and not had_left:
            return  # the main thread has left the run meanwhile, and may save
        for child in multiprocessing.active_children():  # such as loader workers
            with suppress(OSError, ValueError):
                child.kill()
        os._exit(1)


def _changes_weights(frame: FrameType | None) -> bool:
    """Return whether code in `frame` is in the step of an optimizer, but not in the closure that it calls."""
    for each, _ in traceback.walk_stack(frame):
        if each.f_code.co_name == "closure":  # of Lightning
            return False
        if isinstance(each.f_locals.get("self"), Optimizer):
            return True
    return False


# The connections between ranks, over which gloo's collectives run


def own_endpoints(store_port: int | None) -> list[str]:
    """Return this process's ends of its TCP connections, except those from or to `store_port`; without /proc, none."""
    return [own for own, _, _ in _connections(store_port)]


def close_connections(others: Collection[str], store_port: int | None) -> None:
    """Shut down the connections of which `others` are the other ends, so that collectives over gloo end with an error.

    `ProcessGroupGloo.abort` does nothing, and destroying the group closes no connection as long as anything refers to
    it (torch 2.13).
    """
    for _, other, connection in _connections(store_port):
        if other in others:
            with suppress(OSError):  # it was closed in the meantime
                connection.shutdown(socket.SHUT_RDWR)


def _connections(store_port: int | None) -> Iterator[tuple[str, str, socket.socket]]:
    for found in tcp_sockets():
        with suppress(OSError):  # it is not connected
            own, other = found.getsockname(), found.getpeername()
            if store_port not in (own[1], other[1]):
                yield _text(own), _text(other), found


def tcp_sockets() -> Iterator[socket.socket]:
    """Yield the TCP sockets of this process, each until the next one; without /proc, none."""
    for number in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        with suppress(OSError):  # it was closed in the meantime
            if not os.readlink(f"/proc/self/fd/{number}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(number))) as found:
                if found.type == socket.SOCK_STREAM and found.family in (socket.AF_INET, socket.AF_INET6):
                    yield found


def _text(address: Any) -> str:
    return f"{str(address[0]).removeprefix('::ffff:')}:{address[1]}"  # of a socket of IPv6 that uses IPv4


# torchrun


def tell_torchrun(error: BaseException) -> None:
    """Write an `Exception` to the file from which torchrun reads it, to show its traceback in the summary; once."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path and isinstance(error, Exception) and not os.path.exists(path):
        trace = error.__traceback__
        try:
            raise error  # `record_exception` formats the exception that is being handled
        except Exception:
            with suppress(OSError):
                get_error_handler().record_exception(error.with_traceback(trace))
