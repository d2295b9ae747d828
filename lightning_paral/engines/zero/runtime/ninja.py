"""Run ninja, and terminate it when the process that compiles ends: `ninja.py PARENT_PID NINJA ARGUMENT...`.

A killed process cannot terminate its children: ninja and its compilers would run on for minutes. This file is executed
by its path in a bare interpreter, so it must not import anything from this package.
"""

import ctypes
import os
import signal
import subprocess
import sys
from contextlib import suppress
from typing import Any

_SECONDS_TO_END = 10
_PR_SET_PDEATHSIG = 1


def run(parent: int, command: list[str]) -> int:
    """Run `command` and return its exit code. Terminate it when this process is signaled to end, or `parent` ends.

    Args:
        parent: the process ID of the process that compiles.
        command: the path of ninja and its arguments.
    """
    ninja = subprocess.Popen(command, preexec_fn=_end_with_parent)

    def end(*_: Any) -> None:
        ninja.terminate()  # ninja terminates its compilers, each in its own process group

    for each in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(each, end)
    while os.getppid() == parent:
        with suppress(subprocess.TimeoutExpired):
            return ninja.wait(timeout=0.2)
    end()
    try:
        return ninja.wait(timeout=_SECONDS_TO_END)
    except subprocess.TimeoutExpired:
        ninja.kill()
        return ninja.wait()


def _end_with_parent() -> None:
    # Only Linux can terminate ninja when this process is killed.
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(run(int(sys.argv[1]), sys.argv[2:]))
