"""A pool of processes that run functions as the ranks of a process group.

The processes are started once and reused. To Lightning they look like processes of torchrun, so a Trainer in one of
them starts no processes, and a small fit takes hundredths of a second.
"""

import atexit
import ctypes
import faulthandler
import gc
import io
import logging
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from glob import glob
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from lightning_paral.distributed.hangs import library_of
from lightning_paral.registry import STRATEGIES

START_SECONDS = 300.0
END_SECONDS = 10.0  # how long `close` waits for workers to end by themselves
MAX_THREADS = 60
LINGER_SECONDS = 3.0  # how long the other ranks may still report after one has failed
STACK_SECONDS = 5.0  # how long a rank that did not answer may take to write where it is
_PR_SET_PDEATHSIG = 1  # of Linux's prctl
_STACK_SIGNAL = getattr(signal, "SIGRTMIN", signal.SIGUSR1)  # macOS has no real-time signals
_FRAME = re.compile(r'File "(?P<file>.+)", line (?P<line>\d+) in (?P<function>\S+)')


class RankError(AssertionError):
    """A rank raised, died, or did not answer in time. The message has the traceback of every rank that raised."""


class RankPool:
    """Runs functions on the ranks of a process group, each in its own process.

    Args:
        backend: the backend of the process group.
        timeout: seconds after which a collective of the group fails.
    """

    def __init__(self, backend: str = "gloo", timeout: float = 40.0) -> None:
        self._backend, self._timeout = backend, timeout
        self._context = multiprocessing.get_context("forkserver")  # imports modules once for all workers
        self._context.set_forkserver_preload(["lightning.pytorch", "deepspeed", *{each.module for each in STRATEGIES}])
        self._workers: list[tuple[Any, Any]] = []  # a process, and a connection to it
        self._folder = tempfile.mkdtemp(prefix="rank-pool-")
        self._num_worlds = 0
        self._world: tuple[int, str] | None = None
        atexit.register(self.close)  # before multiprocessing waits for the workers

    def run(self, world_size: int, function: Callable[..., Any], *args: Any, timeout: float = 180.0) -> list[Any]:
        """Call `function(*args)` on `world_size` ranks, and return the results in order of the ranks.

        Args:
            world_size: the number of ranks. Missing workers are started.
            function: a function at the top level of a module.
            *args: its arguments, which are pickled.
            timeout: seconds to wait for all ranks, after workers have started.

        Raises:
            RankError: a rank failed, or did not answer in time. All workers are then killed, and the next call starts
                new ones.
        """
        try:
            self._grow_to(world_size)
            if self._world is None or self._world[0] != world_size:
                self._num_worlds += 1
                self._world = (world_size, f"{self._folder}/store-{self._num_worlds}")
            for rank in range(world_size):
                self._workers[rank][1].send((rank, *self._world, (self._backend, self._timeout), function, args))
            return self._collect(world_size, timeout)
        except BaseException:
            self._end_workers()
            raise

    def renew_world(self) -> None:
        """Make the ranks create a new process group at the next call, because collectives are unfinished."""
        self._world = None
        self.end_crowded_workers()

    def end_crowded_workers(self) -> None:
        """End all workers if one has many threads; the next call starts new ones.

        Errors hold modules, and those hold process groups that nothing uses any more, in cycles that are not
        collected. Gloo wakes up each of their threads 100 times per second.
        """
        if any(len(glob(f"/proc/{process.pid}/task/*")) > MAX_THREADS for process, _ in self._workers):
            self._end_workers()

    def close(self) -> None:
        """Let all workers exit, and kill those that do not exit in time."""
        for _, connection in self._workers:
            connection.close()
        deadline = time.monotonic() + END_SECONDS
        for process, _ in self._workers:
            process.join(timeout=max(0.0, deadline - time.monotonic()))
        self._end_workers()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _grow_to(self, num_workers: int) -> None:
        new = range(len(self._workers), num_workers)
        for _ in new:
            ours, theirs = self._context.Pipe()
            stack = f"{self._folder}/stack-{len(self._workers)}"
            process = self._context.Process(target=_serve, args=(theirs, stack))
            with _stdout_in_stderr():
                process.start()
            theirs.close()
            self._workers.append((process, ours))
        for _, connection in self._workers[new.start :]:
            try:
                if not connection.poll(START_SECONDS):
                    raise RankError(f"a rank did not start within {START_SECONDS:.0f} s")
                connection.recv_bytes()
            except (EOFError, ConnectionResetError):
                raise RankError("a rank died when it started") from None

    def _collect(self, world_size: int, timeout: float) -> list[Any]:
        outcomes: dict[int, tuple[bool, Any]] = {}
        deadline = time.monotonic() + timeout
        while len(outcomes) < world_size and time.monotonic() < deadline:
            waiting = {self._workers[rank][1]: rank for rank in range(world_size) if rank not in outcomes}
            ready: list[Any] = wait(list(waiting), timeout=max(0.0, min(0.5, deadline - time.monotonic())))
            for connection in ready:
                try:
                    outcome = torch.load(io.BytesIO(connection.recv_bytes()), weights_only=False)
                except (EOFError, ConnectionResetError):
                    outcome = False, "the process died"
                outcomes[waiting[connection]] = outcome
                if not outcome[0]:
                    deadline = min(deadline, time.monotonic() + LINGER_SECONDS)
        for rank in set(range(world_size)) - set(outcomes):
            outcomes[rank] = False, f"no answer in time{self._place_of(rank)}"
        failures = [f"rank {rank}: {outcomes[rank][1]}" for rank in range(world_size) if not outcomes[rank][0]]
        if failures:
            raise RankError("\n".join(failures))
        return [outcomes[rank][1] for rank in range(world_size)]

    def _place_of(self, rank: int) -> str:
        """Return where a rank is: the innermost frame that is not of a library, if it has one."""
        path, deadline = f"{self._folder}/stack-{rank}", time.monotonic() + STACK_SECONDS
        os.kill(self._workers[rank][0].pid, _STACK_SIGNAL)
        while not os.path.getsize(path) and time.monotonic() < deadline:
            time.sleep(0.1)
        time.sleep(0.1)  # until all of it is written
        with open(path) as file:
            frames = [match for match in map(_FRAME.search, file) if match and match["file"][0] != "<"]
        users = [frame for frame in frames if not library_of(frame["file"])] or frames
        return ", in {2}, {0}:{1}".format(*users[0].groups()) if users else ""

    def _end_workers(self) -> None:
        for process, connection in self._workers:
            connection.close()
            process.kill()
        for process, _ in self._workers:
            process.join(timeout=10)
        self._workers = []
        self._world = None


@contextmanager
def _stdout_in_stderr() -> Iterator[None]:
    """Let new processes write to stderr what they would write to stdout, as libraries do when they are imported."""
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)


def _serve(connection: Connection, stack: str) -> None:
    """Serve calls in a worker until the pool closes the pipe: join the process group, call the function, report."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # the fork server ends with the main process
    stack_file = open(stack, "w")  # noqa: SIM115  stays open
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1", TORCHELASTIC_RUN_ID="rank-pool")
    # As in a process that a user starts: inherited from the forkserver, it would make each worker import torch.
    multiprocessing.set_start_method("fork", force=True)
    torch.set_num_threads(1)
    connection.send_bytes(b"ready")
    world, num_modules = None, 0
    while True:
        if len(sys.modules) > num_modules + 50:  # DeepSpeed collects garbage in every fit: leave out what is imported
            gc.collect()
            gc.freeze()
            num_modules = len(sys.modules)
        try:
            rank, world_size, store, group, function, args = connection.recv()
        except EOFError:
            return
        faulthandler.unregister(_STACK_SIGNAL)  # Lightning resets handlers after a fit, which faulthandler does not see
        faulthandler.register(_STACK_SIGNAL, stack_file, all_threads=False)
        try:
            if world != (world_size, store):
                _join(rank, world_size, store, *group)
                world = (world_size, store)
            outcome = _saved((True, _call_and_restore(function, args)))
        except BaseException:
            outcome = _saved((False, traceback.format_exc()))
        connection.send_bytes(outcome)


def _saved(outcome: tuple[bool, Any]) -> bytes:
    """Return `outcome` as bytes: `Connection.send` would put tensors into shared memory, with a file open for each."""
    file = io.BytesIO()  # not `pickle`, which does not restore tensors of all dtypes
    torch.save(outcome, file)
    return file.getvalue()


def _call_and_restore(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Call `function(*args)`, and restore environment variables, current folder and log level afterwards."""
    environment, folder, level = dict(os.environ), os.getcwd(), logging.root.level
    try:
        return function(*args)
    finally:
        logging.root.setLevel(level)
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)


def _join(rank: int, world_size: int, store: str, backend: str, timeout: float) -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
    sizes = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_SIZE"), str(world_size))
    os.environ.update(sizes, RANK=str(rank), LOCAL_RANK=str(rank))
    limit = timedelta(seconds=timeout)
    dist.init_process_group(backend, f"file://{store}", rank=rank, world_size=world_size, timeout=limit)
