"""Resident memory of this process, as Linux tells it in `/proc/self/status` (proc_pid_status(5))."""

from pathlib import Path

_STATUS = Path("/proc/self/status")


def peak_resident_bytes() -> int:
    """Return the largest resident memory in bytes since the process started, or since its peak was reset.

    0 where the system does not tell it.
    """
    # Not `getrusage`: its peak includes that of the process from which this one was started.
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), 0)
