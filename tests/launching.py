"""Processes that tests and programs start themselves, outside of the pool of ranks."""

import os
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

ROOT = Path(__file__).parents[1]
SECONDS = 300
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
OF_LAUNCHERS = ("MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK", "WORLD_SIZE", "NODE_RANK", "TORCHELASTIC_RUN_ID")

Process = subprocess.Popen[str]


def free_port() -> int:
    """Return a port of this machine that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def leave_pool() -> None:
    """Destroy the process group of the rank pool, so that the strategy creates one. *Collective.*"""
    port = [free_port()]
    dist.broadcast_object_list(port)
    dist.barrier()  # otherwise the other rank could still be connecting
    dist.destroy_process_group()
    os.environ["MASTER_PORT"] = str(port[0])


def start(arguments: list[str], *, cwd: Path = ROOT, output: Any = subprocess.PIPE, **environment: str) -> Process:
    """Start a process without the variables of a launcher or of pytest, with the errors among its output."""
    inherited = {name: value for name, value in os.environ.items() if name not in OF_LAUNCHERS and "PYTEST" not in name}
    return subprocess.Popen(
        arguments,
        cwd=cwd,
        env=inherited | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)} | environment,
        stdin=subprocess.PIPE,
        stdout=output,
        stderr=subprocess.STDOUT,
        text=True,
    )


def outputs(*processes: Process, stdin: str = "") -> list[str]:
    """Wait for all processes, kill those that take too long, and return the output of each."""
    deadline = time.monotonic() + SECONDS
    try:
        return [process.communicate(stdin, timeout=max(1.0, deadline - time.monotonic()))[0] for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()


@pytest.fixture
def launch() -> Iterator[Callable[..., Process]]:
    """A function that runs Python: `launch("-m", "module", "argument", NAME="value")`, `by=` another launcher.

    Processes that run when the test ends are killed.
    """
    processes: list[Process] = []

    def run(*arguments: str, by: tuple[str, ...] = (sys.executable,), **options: Any) -> Process:
        processes.append(start([*by, *arguments], **options))
        return processes[-1]

    yield run
    for process in processes:
        process.kill()
        process.wait(timeout=60)
        for stream in filter(None, (process.stdin, process.stdout)):
            stream.close()


def fork_ranks(world_size: int, store: Path, function: Callable[[int], object]) -> list[int]:
    """Fork ranks that join a process group and call `function(rank)`, for tests that kill them; return their IDs."""
    children = []
    for rank in range(world_size):
        child = os.fork()
        if child == 0:
            try:
                numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
                os.environ.update({name: str(number) for name, number in numbers.items()})
                os.environ.update(TORCHELASTIC_RUN_ID="forked", MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
                file = dist.FileStore(str(store), world_size)
                limit = timedelta(seconds=30)
                dist.init_process_group("gloo", store=file, rank=rank, world_size=world_size, timeout=limit)
                function(rank)
            except BaseException:
                traceback.print_exc()
            os._exit(1)
        children.append(child)
    return children


@dataclass(frozen=True)
class Ended:
    """How a process ended."""

    code: int
    seconds: float
    """From the start of all processes."""
    printed: str
    """Standard output; if `told_apart` was false, also standard error."""


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
