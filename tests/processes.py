"""Processes of a run that are started together, and killed when their time is up."""

import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Ended:
    """How a process ended."""

    code: int
    seconds: float
    """From the start of all processes."""
    printed: str
    """Standard output; if `told_apart` was false, also standard error."""


def free_port() -> int:
    """Return a port of this machine that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_together(
    commands: Sequence[Sequence[str]],
    variables: Sequence[Mapping[str, str]],
    *,
    timeout: float,
    told_apart: bool = False,
) -> list[Ended]:
    """Run commands at the same time, in the root of the repository, and wait until all have ended.

    Args:
        commands: a command for each process.
        variables: what to add to the environment of each.
        timeout: seconds after which those that still run are killed; their code is then -9.
        told_apart: whether to leave standard error out of what is returned, and show it.
    """
    began = time.monotonic()
    with ExitStack() as stack:
        # Files and not pipes, so that nothing waits for a reader.
        logs = [stack.enter_context(tempfile.TemporaryFile()) for _ in commands]
        processes = [
            subprocess.Popen(
                command,
                cwd=ROOT,
                env={**os.environ, **added},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=None if told_apart else subprocess.STDOUT,
            )
            for command, added, log in zip(commands, variables, logs, strict=True)
        ]
        seconds: dict[int, float] = {}
        try:
            while len(seconds) < len(processes) and time.monotonic() - began < timeout:
                for number, process in enumerate(processes):
                    if process.poll() is not None:
                        seconds.setdefault(number, time.monotonic() - began)
                time.sleep(0.05)
        finally:
            for process in processes:
                process.kill()
        ended = []
        for number, (process, log) in enumerate(zip(processes, logs, strict=True)):
            code = process.wait(timeout=20)
            log.seek(0)
            printed = log.read().decode(errors="replace")
            ended.append(Ended(code, seconds.get(number, time.monotonic() - began), printed))
        return ended
