"""Start the ranks of a benchmark on this machine, wait for them, and end them."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from types import TracebackType
from typing import Any, Self

import torch.distributed as dist

from lightning_paral.diagnostics.bench.rank import DONE, ERROR, PROGRESS, RESULT, TURN
from lightning_paral.diagnostics.free_memory import free_host_bytes
from lightning_paral.distributed.launching.children import describe_status
from lightning_paral.errors import ConfigurationError, RankFailedError
from lightning_paral.quantities import format_bytes

RANK_BYTES = 2**29
"""Host memory that a rank needs at least: Python with torch, Lightning and gloo's buffers."""
_POLL_SECONDS = 0.02
_GRACE_SECONDS = 1.0
"""How long to wait for the cause of an error: a rank that lost another one reports sooner than that one ends."""
_SHOWN_LINES = 15

OnProgress = Callable[[str], None]


def check_num_ranks(num_ranks: int, option: str = "--ranks", *, num_groups: int = 1, data_bytes: int = 0) -> None:
    """Check that the ranks fit into host memory.

    Args:
        num_ranks: the number of ranks that are to run.
        option: the option that says so, for messages.
        num_groups: how many times as many processes run, for example one group per strategy.
        data_bytes: what each process needs for the data of the benchmark.

    Raises:
        ConfigurationError: it is less than one, or the ranks need more memory than is free.
    """
    if num_ranks < 1:
        raise ConfigurationError(f"{option} {num_ranks} is not a number of ranks. Give at least 1.")
    each = RANK_BYTES + data_bytes
    groups = f" for each of {num_groups} strategies" if num_groups > 1 else ""
    fewer = " or fewer strategies" if num_groups > 1 else ""
    most = max(1, free_host_bytes() // (each * num_groups))
    check_free_memory(
        f"{option} {num_ranks}{groups}",
        num_ranks * num_groups * each,
        f"Each process needs {format_bytes(each)}. Use {option} {most}{fewer}.",
    )


def check_free_memory(what: str, num_bytes: int, remedy: str) -> None:
    """Check that this machine has enough free host memory.

    Args:
        what: the options that need it, for messages.
        num_bytes: how much they need.
        remedy: what to do if there is less.

    Raises:
        ConfigurationError: less is free.
    """
    free = free_host_bytes()
    if num_bytes > free:
        raise ConfigurationError(
            f"{what} needs about {format_bytes(num_bytes)} of host memory, but {format_bytes(free)} are free. {remedy}"
        )


class Ranks:
    """Processes that run one function, as the ranks of one world. They are killed at the end of the `with` block.

    Args:
        function: the function that each rank calls, as `module:name`; see `Benchmark`.
        arguments: its keyword arguments, which JSON can hold.
        num_ranks: the number of ranks.
        timeout: how long ranks wait for each other, for a turn, and the command for them.
        name: what the ranks run, for errors.
        num_threads: the number of threads with which each rank computes.
    """

    def __init__(
        self,
        function: str,
        arguments: Mapping[str, Any],
        *,
        num_ranks: int,
        timeout: timedelta = timedelta(minutes=10),
        name: str = "",
        num_threads: int = 1,
    ) -> None:
        self.name = name
        self._num_ranks = num_ranks
        self._timeout = timeout
        # A free port, and the ranks use this store for their process group too: there is no other port to agree on.
        self._store = dist.TCPStore(  # type: ignore[attr-defined]  # torch's stubs lack it
            "127.0.0.1", 0, is_master=True, timeout=timeout, wait_for_workers=False
        )
        self._specification = json.dumps(
            {
                "port": self._store.port,
                "parent": os.getpid(),
                "function": function,
                "arguments": dict(arguments),
                "timeout_seconds": timeout.total_seconds(),
                "num_threads": num_threads,
            }
        )
        self._num_threads = num_threads
        self._processes: list[subprocess.Popen[bytes]] = []
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  closed at the end of the `with` block

    def __enter__(self) -> Self:
        """Start the processes."""
        try:
            for rank in range(self._num_ranks):
                self._processes.append(self._start(rank))
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Kill the processes that are running."""
        self.kill()
        self._output.close()

    def _start(self, rank: int) -> subprocess.Popen[bytes]:
        environment = os.environ | {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "GROUP_RANK": "0",
            "WORLD_SIZE": str(self._num_ranks),
            "LOCAL_WORLD_SIZE": str(self._num_ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._store.port),
            # As under torchrun: this process serves the store, and Lightning starts no ranks.
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RUN_ID": "paral-bench",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "0",
            "OMP_NUM_THREADS": str(self._num_threads),
        }
        command = [sys.executable, "-m", "lightning_paral.diagnostics.bench.rank_program", self._specification]
        # In a session of its own, Ctrl-C does not reach the ranks: they would print tracebacks.
        return subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=self._output,
            start_new_session=True,
        )

    def results(self, on_progress: OnProgress | None = None) -> list[Any]:
        """Wait until the function has returned on all ranks, and return its results in the order of ranks.

        Raises:
            ConfigurationError: the first error of a rank is one.
            RankFailedError: a rank raised another error, was killed, or did not end in time.
        """
        return self._wait([f"{RESULT}/{rank}" for rank in range(self._num_ranks)], on_progress)

    def take_turn(self, number: int, on_progress: OnProgress | None = None) -> list[Any]:
        """Let the ranks measure in turn `number`, and return their results. Raises the errors of `results`."""
        self._store.set(f"{TURN}/{number}", "go")
        return self._wait([f"{DONE}/{number}/{rank}" for rank in range(self._num_ranks)], on_progress)

    def end_turns(self, number: int) -> None:
        """Tell the ranks that turn `number` is the last."""
        self._store.set(f"{TURN}/{number}", "last")

    def _wait(self, keys: Sequence[str], on_progress: OnProgress | None) -> list[Any]:
        deadline = time.monotonic() + self._timeout.total_seconds()
        shown = b""
        while not self._store.check(list(keys)):
            self._raise_failure()
            if time.monotonic() > deadline:
                missing = [number for number, key in enumerate(keys) if not self._store.check([key])]
                raise RankFailedError(
                    f"{self._prefix()}rank {', '.join(map(str, missing))} did not end within {self._timeout}. Raise "
                    f"--timeout, or measure less.{self._printed()}"
                )
            if on_progress is not None and self._store.check([PROGRESS]):
                text = self._store.get(PROGRESS)
                if text != shown:
                    on_progress(text.decode())
                shown = text
            time.sleep(_POLL_SECONDS)
        return [json.loads(self._store.get(key)) for key in keys]

    def _raise_failure(self) -> None:
        """Raise the first error of a rank, if any."""
        ended = [process for process in self._processes if process.poll() not in (None, 0)]
        if not ended and not self._store.check([f"{ERROR}/1"]):
            return
        deadline = time.monotonic() + _GRACE_SECONDS
        while time.monotonic() < deadline and any(process.poll() is None for process in self._processes):
            time.sleep(_POLL_SECONDS)
        for rank, process in enumerate(self._processes):
            status = process.poll()
            if status is not None and (status < 0 or (status > 0 and not self._store.check([f"{ERROR}/1"]))):
                raise RankFailedError(f"{self._prefix()}rank {rank}: {describe_status(status)}.{self._printed()}")
        first = json.loads(self._store.get(f"{ERROR}/1"))
        if first["is_configuration"]:
            raise ConfigurationError(f"{self._prefix()}{first['message']}")
        raise RankFailedError(
            f"{self._prefix()}rank {first['rank']} failed with {first['type']}: {first['message']}{self._printed()}"
        )

    def _prefix(self) -> str:
        return f"{self.name}: " if self.name else ""

    def _printed(self) -> str:
        """Return the last lines that the ranks have printed."""
        self._output.seek(0)
        lines = self._output.read().decode(errors="replace").strip().splitlines()[-_SHOWN_LINES:]
        return "\n\nThe ranks printed:\n" + "\n".join(f"    {line}" for line in lines) if lines else ""

    def kill(self) -> None:
        """Kill the processes, with those that they started, and wait for them."""
        for process in self._processes:
            if process.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        for process in self._processes:
            process.wait()
        self._processes.clear()


def run_on_ranks(
    function: str,
    arguments: Mapping[str, Any],
    *,
    num_ranks: int,
    timeout: timedelta = timedelta(minutes=10),
    num_threads: int = 1,
    name: str = "",
    on_progress: OnProgress | None = None,
) -> list[Any]:
    """Call a function on new ranks of this machine, and return its results in the order of ranks.

    Arguments and errors are those of `Ranks`.
    """
    with Ranks(function, arguments, num_ranks=num_ranks, timeout=timeout, num_threads=num_threads, name=name) as ranks:
        return ranks.results(on_progress)
