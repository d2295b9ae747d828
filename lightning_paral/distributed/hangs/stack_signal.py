"""Notice SIGUSR2 in any thread, also while the main thread is in a collective."""

import faulthandler
import os
import signal
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

_SIGNAL: Any = getattr(signal, "SIGUSR2", None)  # Windows has none


class StackSignal:
    """Takes SIGUSR2 unless the process handles it already.

    A handler of Python's `signal` runs only when the main thread returns to the interpreter, which it does not do in a
    collective that hangs. The handler of `faulthandler` runs at once: it writes to a pipe, which any thread can read.
    """

    def __init__(self) -> None:
        self._pipe: tuple[int, int] | None = None
        if _SIGNAL is not None and not _is_handled():
            self._pipe = os.pipe()
            for end in self._pipe:
                os.set_blocking(end, False)  # otherwise a full pipe would stop the main thread
            faulthandler.register(_SIGNAL, file=self._pipe[1], all_threads=False)

    @property
    def is_taken(self) -> bool:
        """Whether SIGUSR2 is noticed by this object."""
        return self._pipe is not None

    def has_arrived(self) -> bool:
        """Return whether the signal has arrived since the last call."""
        arrived = False
        with suppress(BlockingIOError, OSError):
            while self._pipe is not None and os.read(self._pipe[0], 65536):
                arrived = True
        return arrived

    def release(self) -> None:
        """Give the signal back, unless the user's code has set a handler in the meantime."""
        if self._pipe is None:
            return
        theirs = signal.getsignal(_SIGNAL)
        faulthandler.unregister(_SIGNAL)
        if theirs != signal.SIG_DFL and threading.current_thread() is threading.main_thread():
            signal.signal(_SIGNAL, theirs)
        pipe, self._pipe = self._pipe, None
        for end in pipe:
            os.close(end)


def _is_handled() -> bool:
    """Return whether the process handles or ignores SIGUSR2."""
    if signal.getsignal(_SIGNAL) != signal.SIG_DFL:
        return True
    with suppress(OSError):  # `getsignal` does not know handlers that were set outside of Python's `signal`
        for line in Path("/proc/self/status").read_text().splitlines():
            name, _, mask = line.partition(":")
            if name in ("SigCgt", "SigIgn") and int(mask, 16) >> (_SIGNAL - 1) & 1:
                return True
    return False
