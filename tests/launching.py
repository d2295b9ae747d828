"""Processes that tests start themselves, outside of the pool of ranks."""

import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.processes import free_port

ROOT = Path(__file__).parents[1]
SECONDS = 300
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
OF_LAUNCHERS = ("MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK", "WORLD_SIZE", "NODE_RANK", "TORCHELASTIC_RUN_ID")

Process = subprocess.Popen[str]


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
