"""A pool of processes that run functions as the ranks of a process group.

The processes are started once and reused. To Lightning they look like processes of torchrun, so a Trainer in one of
them starts no processes, and a small fit takes hundredths of a second.
"""

import atexit
import gc
import io
import logging
import os
import shutil
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from glob import glob
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from lightning_paral.distributed.hangs import place_of_thread
from lightning_paral.distributed.launcher import end_with_parent
from lightning_paral.registry import STRATEGIES

START_SECONDS = 300.0
MAX_THREADS = 60
LINGER_SECONDS = 3.0  # how long the other ranks may still report after one has failed


class RankError(AssertionError):
    """A rank raised, died, or did not answer in time. The message has the traceback of every rank that raised.

    Args:
        outcomes: of each rank, whether it has succeeded, and what it has returned, or why it has not.
    """

    def __init__(self, outcomes: dict[int, tuple[bool, Any]]) -> None:
        failures = [f"rank {rank}: {why}" for rank, (succeeded, why) in sorted(outcomes.items()) if not succeeded]
        super().__init__("\n".join(failures))
        self.outcomes = outcomes


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
            while len(self._workers) < world_size:
                self._start_worker()
            if self._world is None or self._world[0] != world_size:
                self._num_worlds += 1
                self._world = (world_size, f"{self._folder}/store-{self._num_worlds}")
            connections = [connection for _, connection in self._workers[:world_size]]
            for connection in connections:
                if connection.poll(START_SECONDS):  # it says that it is ready, or it has died
                    connection.recv_bytes()
            for rank, connection in enumerate(connections):
                connection.send((rank, *self._world, self._backend, self._timeout, timeout, function, args))
            return _collect(connections, timeout)
        except BaseException as error:
            self._end_workers()
            if isinstance(error, EOFError | OSError):
                raise RankError({0: (False, "a rank died when it started")}) from None
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
        """End all workers."""
        self._end_workers()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _start_worker(self) -> None:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_serve, args=(theirs,))
        stdout = os.dup(1)
        os.dup2(2, 1)  # libraries print when they are imported
        try:
            process.start()
        finally:
            os.dup2(stdout, 1)
            os.close(stdout)
        theirs.close()
        self._workers.append((process, ours))

    def _end_workers(self) -> None:
        for process, connection in self._workers:
            connection.close()
            process.kill()
        for process, _ in self._workers:
            process.join(timeout=10)
        self._workers = []
        self._world = None


def _collect(connections: list[Connection], timeout: float) -> list[Any]:
    """Return what the ranks return; raise a `RankError` if one fails, or is silent for longer than its own timeout."""
    outcomes: dict[int, tuple[bool, Any]] = {}
    deadline = time.monotonic() + timeout + LINGER_SECONDS
    while len(outcomes) < len(connections) and time.monotonic() < deadline:
        waiting = {each: rank for rank, each in enumerate(connections) if rank not in outcomes}
        ready: list[Any] = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        for connection in ready:
            try:
                outcome = torch.load(io.BytesIO(connection.recv_bytes()), weights_only=False)
            except (EOFError, ConnectionResetError):
                outcome = False, "the process died"
            outcomes[waiting[connection]] = outcome
            if not outcome[0]:
                deadline = min(deadline, time.monotonic() + LINGER_SECONDS)
    for rank in range(len(connections)):
        outcomes.setdefault(rank, (False, "no answer in time"))
    if not all(succeeded for succeeded, _ in outcomes.values()):
        raise RankError(outcomes)
    return [outcomes[rank][1] for rank in range(len(connections))]


def _serve(connection: Connection) -> None:
    """Serve calls in a worker until the pool closes the pipe: join the process group, call the function, report."""
    end_with_parent()  # the fork server, which ends with the main process
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1", TORCHELASTIC_RUN_ID="rank-pool")
    # As in a process that a user starts: inherited from the forkserver, it would make each worker import torch.
    multiprocessing.set_start_method("fork", force=True)
    torch.set_num_threads(1)
    world, num_modules, sending = None, 0, threading.Lock()

    def send(succeeded: bool, result: Any) -> None:
        # Not `pickle`, which does not restore tensors of all dtypes, and shares their memory by a file for each.
        file = io.BytesIO()
        torch.save((succeeded, result), file)
        with sending:
            connection.send_bytes(file.getvalue())

    def give_up() -> None:
        send(False, f"no answer in time, in {place_of_thread(threading.main_thread().ident or 0).text}")

    while True:
        if len(sys.modules) > num_modules + 50:  # DeepSpeed collects garbage in every fit: leave out what is imported
            gc.collect()
            gc.freeze()
            num_modules = len(sys.modules)
        try:
            connection.send_bytes(b"ready")
            rank, world_size, store, backend, of_group, timeout, function, args = connection.recv()
        except (EOFError, ConnectionError):
            return
        timer = threading.Timer(timeout, give_up)
        timer.daemon = True
        timer.start()
        try:
            if world != (world_size, store):
                _join(rank, world_size, store, backend, of_group)
                world = (world_size, store)
            send(True, _call_and_restore(function, args))
        except BaseException:
            send(False, traceback.format_exc())
        timer.cancel()


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
