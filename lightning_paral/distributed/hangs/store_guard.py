"""End a rank if the process that serves the store has stopped without closing its connections."""

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

_LEAST_SECONDS = 10
"""No process is ended before the store has failed to answer for this long, however short the timeout is."""

log = logging.getLogger(__name__)


class StoreGuard:
    """Ends this process if no call of the watcher to the store returns for too long.

    A call to the store has no timeout of its own. While the process that serves the store is stopped, or its node
    cannot be reached, every call blocks, and so does everything that ends a run after a failure. The guard counts
    seconds in which this process runs, so that ranks continue after their node was suspended.

    Args:
        num_polls: returns how often the watcher has reached the store.
        patience: returns for how many seconds the store may fail to answer.
        describe: returns where the main thread is, for the message.
        interval: the number of seconds that count as one.
    """

    def __init__(
        self,
        num_polls: Callable[[], int],
        patience: Callable[[], float],
        describe: Callable[[], str],
        interval: float = 1.0,
    ) -> None:
        self._num_polls, self._patience, self._describe = num_polls, patience, describe
        self.launcher: int | None = None
        """The process that started this one and serves the store; `None` if there is none. If it is stopped, it is
        killed as well; otherwise the run would not end until it is continued."""
        self._interval = interval
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="lightning_paral_store_guard", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """End the thread, and wait for it, for a second at most: it would keep the run's objects in memory."""
        self._ended.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=1.0)

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle as `None`, because a thread belongs to one process."""
        return type(None), ()

    def _watch(self) -> None:
        seen, silent = self._num_polls(), 0
        while not self._ended.wait(self._interval):
            now = self._num_polls()
            silent = silent + 1 if now == seen else 0
            seen = now
            if silent > max(_LEAST_SECONDS, self._patience()):
                self._end_process(silent)

    def _end_process(self, silent: int) -> None:
        sys.stderr.write(
            f"The process that serves the store, which is rank 0 or torchrun, has not answered for {silent} s: it is "
            f"stopped, or its node cannot be reached. {self._describe()}\n"
        )
        sys.stderr.flush()
        self.end_stopped_launcher()
        os._exit(1)

    def end_stopped_launcher(self) -> None:
        """Kill the process that started this one if a signal has stopped it. Call this only if the run has failed."""
        if self.launcher is not None and is_stopped(self.launcher):
            log.error("Rank 0 (process %d) is stopped, and the run has failed: killing it.", self.launcher)
            with suppress(OSError):
                os.kill(self.launcher, signal.SIGKILL)


def is_stopped(process: int) -> bool:
    """Return whether a signal such as SIGSTOP has stopped `process`. Always `False` except on Linux."""
    with suppress(OSError, IndexError):
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    return False
