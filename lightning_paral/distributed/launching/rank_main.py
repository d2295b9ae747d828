"""Run a function in the process of a rank, and report to the process that started it."""

import ctypes
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from lightning_paral.distributed.frames import library_of
from lightning_paral.distributed.launching.launcher import agreed_status
from lightning_paral.errors import RankFailedError

FORWARDED = ("SIGTERM", "SIGUSR1", "SIGUSR2")
"""Signals that the process which started the ranks sends on to them."""

_FAILED_AT = "lightning_paral_failed_at"
_PR_SET_PDEATHSIG = 1  # of Linux's prctl


@dataclass(frozen=True, kw_only=True)
class RankError:
    """The error with which a rank ended."""

    rank: int
    error: BaseException
    seconds: float
    """When it ended, on the monotonic clock of the node."""
    is_consequence: bool = False
    """Whether the rank ended because another one had failed."""


_parent: Connection | None = None
"""In the process of a rank, the connection to the process that started it."""


def tell_parent(rank: int, message: str, trace: str) -> bool:
    """Tell the process that started this rank, if it waits, that this rank ends because of another one.

    Args:
        rank: the rank of this process, whose main thread cannot report.
        message: why it ends.
        trace: the traceback of the cause.

    Returns:
        bool: whether there is such a process. It raises the error of the rank that failed first.
    """
    if _parent is None:
        return False
    error = RankFailedError(message)
    error.add_note(trace)
    report = RankError(rank=rank, error=error, seconds=time.monotonic(), is_consequence=True)
    with suppress(OSError):
        _parent.send_bytes(pickle.dumps((False, report)))
    return True


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


def run_in_rank(
    rank: int, parent: int | None, connection: Connection, target: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    """Call `target` in the process of `rank`, and report what it returns or raises."""
    global _parent
    _parent = connection
    _end_with(parent)
    for name in FORWARDED:
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_DFL)  # not the handlers of the parent
    status = 0
    try:
        report: tuple[bool, Any] = True, target(rank, *arguments)
    except BaseException as error:
        seconds = getattr(error, _FAILED_AT, time.monotonic())
        is_consequence = isinstance(error, RankFailedError)
        portable = _portable(error, rank)
        report = False, RankError(rank=rank, error=portable, seconds=seconds, is_consequence=is_consequence)
        status = 1
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
        # The run ended early, also if the status is 0.
        error = SystemExit(error.code or (1 if agreed_status() is None else 0))
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
