"""The processes of the other local ranks, which the process of local rank 0 started."""

import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

_POLL_SECONDS = 0.1

OnEnd = Callable[[int, int], None]
"""A function that is called, in a thread, with the rank and the status of a process that has ended."""


class Children:
    """Watches processes in a daemon thread, and ends them.

    Args:
        processes: the processes by global rank.
        on_end: called once for each process that ends.
    """

    def __init__(self, processes: "Mapping[int, subprocess.Popen[Any]]", on_end: OnEnd) -> None:
        self._processes = dict(processes)
        self._on_end = on_end
        self._is_ended = False
        threading.Thread(target=self._watch, name="lightning_paral_children", daemon=True).start()

    def statuses(self) -> dict[int, int]:
        """Return, by rank, the exit statuses of the processes that have ended."""
        found = {rank: process.poll() for rank, process in self._processes.items()}
        return {rank: status for rank, status in found.items() if status is not None}

    def send(self, signum: Any) -> None:
        """Send a signal to those that are running."""
        for process in self._processes.values():
            process.send_signal(signum)

    def stop_watching(self) -> None:
        """Do not call `on_end` from now on."""
        self._is_ended = True

    def wait(self) -> None:
        """Wait until all have ended."""
        for process in self._processes.values():
            process.wait()

    def end(self, grace_seconds: float) -> None:
        """Wait `grace_seconds` for the processes, then terminate them, and kill those that remain a second later."""
        self.stop_watching()
        deadline = time.monotonic() + grace_seconds
        for end in (None, subprocess.Popen.terminate, subprocess.Popen.kill):
            for process in self._processes.values():
                if end is not None and process.poll() is None:
                    end(process)
            for process in self._processes.values():
                with suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=max(0.1, deadline - time.monotonic()))
            deadline = time.monotonic() + 1.0

    def _watch(self) -> None:
        ended: set[int] = set()
        while not self._is_ended and len(ended) < len(self._processes):
            for rank, status in self.statuses().items():
                if rank not in ended and not self._is_ended:
                    ended.add(rank)
                    self._on_end(rank, status)
            time.sleep(_POLL_SECONDS)


def describe_status(status: int) -> str:
    """Return how a process with this exit status ended, such as `its process was killed by SIGKILL`."""
    if status >= 0:
        return f"its process exited with status {status}"
    name = signal.Signals(-status).name if -status in {each.value for each in signal.Signals} else f"signal {-status}"
    memory = ", which Linux sends if memory runs out" if name == "SIGKILL" else ""
    return f"its process was killed by {name}{memory}"
