"""Interrupt Python code in the main thread from another thread."""

import signal
import threading
from contextlib import suppress
from types import FrameType
from typing import Any

from lightning_paral.distributed.failures.failure import InterruptedByFailure


class Interrupt:
    """A real-time signal that raises an `InterruptedByFailure` in the main thread, also while it sleeps or waits."""

    def __init__(self) -> None:
        self._message = ""
        self._is_stopped = False
        self._signal = getattr(signal, "SIGRTMIN", 0) + 7 if hasattr(signal, "SIGRTMIN") else None
        self._previous: Any = None
        if threading.current_thread() is not threading.main_thread():  # only the main thread handles signals
            self._signal = None
        if self._signal is not None:
            self._previous = signal.signal(self._signal, self._raise)

    def send(self, thread: int, message: str) -> None:
        """Raise an `InterruptedByFailure` with this message in the thread with this identifier."""
        self._message = message
        if self._signal is not None:
            with suppress(OSError):
                signal.pthread_kill(thread, self._signal)

    def stop(self) -> None:
        """Raise no error from now on, also for a signal that was already sent. Call this in the main thread."""
        self._is_stopped = True

    def end(self) -> None:
        """Restore the signal's handler."""
        self._message = ""
        if self._signal is not None and threading.current_thread() is threading.main_thread():
            signal.signal(self._signal, self._previous or signal.SIG_DFL)
            self._signal = None

    def _raise(self, signum: int, frame: FrameType | None) -> None:
        if self._message and not self._is_stopped:
            message, self._message = self._message, ""
            raise InterruptedByFailure(message)
