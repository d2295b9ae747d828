"""Interrupt Python code in the main thread from another thread."""

import signal
import threading
from contextlib import suppress
from types import FrameType
from typing import Any

from lightning_paral.distributed.failures.failure import InterruptedByFailure

_SIGNUM = signal.SIGRTMIN + 7 if hasattr(signal, "SIGRTMIN") else None

_current: "Interrupt | None" = None
_previous: Any = None


class Interrupt:
    """A real-time signal that raises an `InterruptedByFailure` in the main thread, also while it sleeps or waits.

    In a process that is not in its main thread, which alone handles signals, it does nothing.
    """

    def __init__(self) -> None:
        global _current, _previous
        self._message = ""
        self._is_stopped = False
        self._is_set = _SIGNUM is not None and threading.current_thread() is threading.main_thread()
        if _SIGNUM is not None and self._is_set:
            before: Any = signal.getsignal(_SIGNUM)
            if before is not _handle:  # else Lightning restored it after the previous run
                _previous = before
                signal.signal(_SIGNUM, _handle)
            _current = self

    def send(self, thread: int, message: str) -> None:
        """Raise an `InterruptedByFailure` with this message in the thread with this identifier."""
        self._message = message
        if _SIGNUM is not None and self._is_set:
            with suppress(OSError):
                signal.pthread_kill(thread, _SIGNUM)

    def stop(self) -> None:
        """Raise no error from now on, also for a signal that was already sent. Call this in the main thread."""
        self._is_stopped = True

    def end(self) -> None:
        """Restore the signal's handler."""
        global _current
        self._message = ""
        if _SIGNUM is not None and self._is_set and threading.current_thread() is threading.main_thread():
            self._is_set = False
            if _current is self:
                _current = None
                signal.signal(_SIGNUM, _previous or signal.SIG_DFL)

    def raise_error(self) -> None:
        """Raise the error that was sent, once."""
        if self._message and not self._is_stopped:
            message, self._message = self._message, ""
            raise InterruptedByFailure(message)


def _handle(signum: int, frame: FrameType | None) -> None:
    if _current is not None:
        _current.raise_error()
