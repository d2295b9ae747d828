"""Resident memory of this process, as Linux tells it in `/proc/self/status` (proc_pid_status(5))."""

from pathlib import Path
from typing import Final

STATUS: Final = Path("/proc/self/status")


def resident_bytes() -> int:
    """Return the resident memory of this process in bytes; 0 where the system does not tell it."""
    return _read("VmRSS")


def peak_resident_bytes() -> int:
    """Return the largest resident memory in bytes since the process started, or since its peak was reset.

    0 where the system does not tell it.
    """
    # Not `getrusage`: its peak includes that of the process from which this one was started.
    return _read("VmHWM")


def _read(field: str) -> int:
    try:
        lines = STATUS.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:")), 0)
