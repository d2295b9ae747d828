"""Call functions in a thread when a signal arrives, even if the main thread is in C code, such as a collective.

Python runs signal handlers in the main thread between two bytecodes: not while it waits in a collective. But the C part
of the handler writes the number of the signal to a file descriptor immediately (`signal.set_wakeup_fd`). A thread reads
from it.
"""

import logging
import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any

from lightning_paral.distributed.failure import ignore

Handler = Callable[[int, FrameType | None], Any] | int | None
log = logging.getLogger(__name__)


def call_on_signal(signum: int, call: Callable[[], None], previous: Handler = None) -> Callable[[], None]:
    """Call `call` in a thread whenever this process receives the signal `signum`, and return a function that undoes it.

    The handler that was set before is still called, in the main thread, if it is a function. A default action, such as
    ending the process, does not happen as long as `call` is registered. Forked processes handle the signal as before.

    Call this and the returned function in the main thread; in another thread they do nothing, because Python sets
    handlers in the main thread only.

    Args:
        signum: the signal.
        call: a function that returns quickly and may be called at any time.
        previous: the handler to call and to restore; by default, the one that is set.
    """
    if threading.current_thread() is not threading.main_thread():
        return lambda: None
    return _ROUTES.add(signum, call, _in_use(signal.getsignal(signum) if previous is None else previous))


def handler_of(signum: int) -> Handler:
    """Return the handler of a signal, without one of this module that was undone, and then restored by Lightning."""
    return _in_use(signal.getsignal(signum))


def _in_use(handler: Handler) -> Handler:
    while isinstance(handler, _Handler) and not handler.calls:
        handler = handler.previous
    return handler


class _Replacement:
    """A handler of a signal that takes the place of another one."""

    def __init__(self, signum: int, previous: Handler) -> None:
        self.signum, self.previous = signum, previous

    def restore(self) -> None:
        """Set the previous handler, unless someone has replaced this one."""
        current: object = signal.getsignal(self.signum)
        if current is self:
            signal.signal(self.signum, signal.SIG_DFL if self.previous is None else self.previous)


class _Handler(_Replacement):
    """The Python part of the handler of one signal, which runs in the main thread."""

    def __init__(self, signum: int, previous: Handler) -> None:
        super().__init__(signum, previous)
        self.calls: list[Callable[[], None]] = []

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        if callable(self.previous):
            self.previous(signum, frame)
        elif self.previous == signal.SIG_DFL and not self.calls:
            # Someone restored this handler after it was undone.
            signal.signal(signum, signal.SIG_DFL)
            os.kill(os.getpid(), signum)


class _Routes:
    """The signals of this process that a thread listens to."""

    def __init__(self) -> None:
        self._handlers: dict[int, _Handler] = {}
        self._write_end = -1
        self._previous_fd = -1
        self._registered_fork = False

    def add(self, signum: int, call: Callable[[], None], previous: Handler) -> Callable[[], None]:
        """Call `call` on `signum`; return a function that undoes it."""
        self._start()
        known, current = self._handlers.get(signum), signal.getsignal(signum)
        handler = known if known is not None else _Handler(signum, previous)
        if current != handler:  # a new handler, or someone has replaced ours
            handler.previous = previous
            self._handlers[signum] = handler
            signal.signal(signum, handler)
        handler.calls.append(call)

        def undo() -> None:
            current = self._handlers.get(signum)
            if current is None or call not in current.calls:
                return
            if threading.current_thread() is not threading.main_thread():
                return
            current.calls.remove(call)
            if not current.calls:
                del self._handlers[signum]
                current.restore()
            if not self._handlers:
                self._stop()

        return undo

    def _start(self) -> None:
        if self._write_end != -1:
            return
        if not self._registered_fork:
            self._registered_fork = True
            os.register_at_fork(after_in_child=self._forget)
        read_end, self._write_end = os.pipe()
        os.set_blocking(self._write_end, False)
        self._previous_fd = signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)
        threading.Thread(target=self._listen, args=(read_end,), name="lightning_paral_signals", daemon=True).start()

    def _stop(self) -> None:
        current = signal.set_wakeup_fd(self._previous_fd)
        if current != self._write_end:  # someone else listens by now
            signal.set_wakeup_fd(current)
        os.close(self._write_end)  # ends the thread
        self._write_end = -1

    def _listen(self, read_end: int) -> None:
        previous_fd = self._previous_fd
        while signums := os.read(read_end, 64):
            if previous_fd != -1:
                with suppress(OSError):
                    os.write(previous_fd, signums)
            for signum in signums:
                handler = None if signal.getsignal(signum) is ignore else self._handlers.get(signum)
                for call in [] if handler is None else list(handler.calls):
                    try:
                        call()
                    except Exception:
                        log.exception("Handling %s failed", signal.Signals(signum).name)
        os.close(read_end)

    def _forget(self) -> None:
        """Restore the handlers in a forked process, whose signals would otherwise be taken for those of its parent."""
        if self._write_end == -1:
            return
        with suppress(ValueError):
            signal.set_wakeup_fd(-1)
            for handler in self._handlers.values():
                handler.calls.clear()  # also if it is not restored now, because another one has taken its place
                handler.restore()
        os.close(self._write_end)
        self._handlers, self._write_end = {}, -1


_ROUTES = _Routes()
