"""Run ninja, and end it with the process that compiles: `ninja.py PROCESS NINJA ARGUMENT...`.

A process that is killed cannot end what it started: ninja would go on, and its compilers, for minutes. This file is run
by its path, in a bare interpreter: it imports nothing of this package.
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
    """Run `command`, and end it when this process is told to end or `parent` has ended; return its exit code."""
    ninja = subprocess.Popen(command, preexec_fn=_end_with_parent)

    def end(*_: Any) -> None:
        ninja.terminate()  # it ends its compilers, which are in process groups of their own

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
    # Where this process is killed, too. Other systems than Linux have no such thing.
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(run(int(sys.argv[1]), sys.argv[2:]))
