"""Notice SIGUSR2, unless the process handles it already."""

import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from lightning_paral.distributed.signals import call_on_signal, handler_of

_SIGNAL: Any = getattr(signal, "SIGUSR2", None)  # Windows has none


def call_on_stack_signal(call: Callable[[], None]) -> Callable[[], None]:
    """Call `call` in a thread whenever SIGUSR2 arrives, and return a function that undoes it. See `call_on_signal`."""
    return (lambda: None) if _SIGNAL is None or _is_handled() else call_on_signal(_SIGNAL, call)


def _is_handled() -> bool:
    """Return whether the process handles or ignores SIGUSR2."""
    if handler_of(_SIGNAL) != signal.SIG_DFL:
        return True
    if signal.getsignal(_SIGNAL) != signal.SIG_DFL:  # by what an ended run has left
        return False
    with suppress(OSError):  # `getsignal` does not know handlers that were set outside of Python's `signal`
        for line in Path("/proc/self/status").read_text().splitlines():
            name, _, mask = line.partition(":")
            if name in ("SigCgt", "SigIgn") and int(mask, 16) >> (_SIGNAL - 1) & 1:
                return True
    return False
