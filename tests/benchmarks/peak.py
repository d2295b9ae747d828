"""The peak memory of this process."""

import threading
from pathlib import Path


class Watch:
    """Measures the peak memory of this process in bytes, relative to that at the start."""

    def __init__(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
        self._own_before, self._resident_before = _status("RssAnon"), _status("VmRSS")
        self._own, self._done = self._own_before, threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()

    def end(self) -> tuple[int, int]:
        """Return the peaks of anonymous memory, looked at every millisecond, and of all resident memory."""
        self._done.set()
        self._thread.join()
        return self._own - self._own_before, self.resident()

    def resident(self) -> int:
        """Return the peak of all resident memory so far."""
        return _status("VmHWM") - self._resident_before

    def _look(self) -> None:
        while not self._done.wait(0.001):
            self._own = max(self._own, _status("RssAnon"))


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))
