"""Start ranks on this machine, run every collective on them with a bounded wait, and leave no process behind."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import IO, Any, Literal

import psutil
import torch
import torch.distributed as dist

from lightning_paral.diagnostics.doctor.collectives import BETWEEN_TWO, COLLECTIVES, LARGE_BYTES, WITHOUT_DATA
from lightning_paral.diagnostics.doctor.rank import START, answer_key, go_key
from lightning_paral.diagnostics.free_memory import free_host_bytes
from lightning_paral.distributed.launching.children import describe_status
from lightning_paral.distributed.process_group import backend_for
from lightning_paral.errors import ConfigurationError
from lightning_paral.quantities import format_bytes

RANK_BYTES = 2**29
"""The host memory that a rank needs on the CPU. Its own pages are 0.3 GiB with torch's CPU build, 0.41 with CUDA's."""

_RANK_MODULE = "lightning_paral.diagnostics.doctor.rank"
_PAUSE = 0.02
_MANY_RANKS = 8
"""With more ranks, which share the cores of this machine, collectives have more time in proportion."""

_AFTER_ERROR = 1.0
"""Seconds to wait for the death of a rank after another one reported an error, which may be its consequence."""


@dataclass(frozen=True, kw_only=True)
class CollectiveRow:
    """What a collective took, or why it failed."""

    name: str
    state: Literal["ok", "failed", "skipped"]
    latency: float | None = None
    """Seconds per call with 8 bytes, on the slowest rank. Of `START`: seconds until all ranks had joined."""
    bandwidth: float | None = None
    """Bytes per second: 4 MiB, the larger of input and output, over the seconds per call on the slowest rank. `None`
    for one rank, which sends nothing."""
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class CollectiveResults:
    """The rows of all collectives, and what they ran on."""

    ranks: int
    device: Literal["cpu", "cuda"]
    backend: str
    rows: tuple[CollectiveRow, ...]


def check_ranks(num_ranks: int) -> None:
    """Check that so many ranks fit into the memory of this machine.

    Raises:
        ConfigurationError: there are no ranks, or too many.
    """
    if num_ranks < 1:
        raise ConfigurationError(f"--ranks {num_ranks} is not a number of ranks. Give 1 or more.")
    free = free_host_bytes()
    if num_ranks * RANK_BYTES > free:
        raise ConfigurationError(
            f"--ranks {num_ranks} needs about {format_bytes(num_ranks * RANK_BYTES)} of host memory, "
            f"{format_bytes(RANK_BYTES)} for each rank, but {format_bytes(free)} are available. Give at most "
            f"{max(1, free // RANK_BYTES)}, or end other programs."
        )


def run_collectives(
    num_ranks: int,
    *,
    names: Sequence[str] = tuple(COLLECTIVES),
    seconds: float = 15.0,
    on_row: Callable[[CollectiveRow], None] = lambda row: None,
) -> CollectiveResults:
    """Run collectives on ranks that are started here, with NCCL if there is a CUDA device for each, else with gloo.

    After a failure, new ranks are started for the collectives that remain. If a rank cannot start, they are skipped.

    Args:
        num_ranks: the number of ranks.
        names: names in `COLLECTIVES`, in the order in which they run.
        seconds: how long each may take, with up to 8 ranks; more in proportion with more. Ranks have longer
            to start, because several import torch at once.
        on_row: called after each collective.

    Raises:
        ConfigurationError: there are no ranks, or too many for the memory of this machine.
    """
    check_ranks(num_ranks)
    device: Literal["cpu", "cuda"] = "cpu"
    if torch.cuda.device_count() >= num_ranks and dist.is_nccl_available():
        device = "cuda"
    rows: list[CollectiveRow] = []

    def add(row: CollectiveRow) -> None:
        rows.append(row)
        on_row(row)

    pending = [name for name in names if num_ranks > 1 or name not in BETWEEN_TWO]
    for name in names:
        if name not in pending:
            add(CollectiveRow(name=name, state="skipped", reason="it needs two ranks"))
    while pending:
        with _Ranks(num_ranks, device, pending, seconds) as ranks:
            started = ranks.wait_for(START)
            if started.state == "failed" or not any(row.name == START for row in rows):
                add(started)
            while pending and started.state == "ok":
                row = ranks.wait_for(pending.pop(0))
                add(row)
                if row.state == "failed":
                    break
        if started.state == "failed":
            for name in pending:
                add(CollectiveRow(name=name, state="skipped", reason="the ranks did not start"))
            break
    order = (START, *names)
    rows.sort(key=lambda row: order.index(row.name))
    backend = backend_for(torch.device(device))
    return CollectiveResults(ranks=num_ranks, device=device, backend=backend, rows=tuple(rows))


class _Ranks:
    """The processes of the ranks and the store that they report to. Leaving the context ends them."""

    def __init__(self, num_ranks: int, device: str, names: Sequence[str], seconds: float) -> None:
        self._num_ranks = num_ranks
        self._seconds = seconds * max(1.0, num_ranks / _MANY_RANKS)
        cores = os.cpu_count() or 1
        self._start_seconds = 60 + seconds + 15 * num_ranks / cores
        # The wait of this process ends first: it knows which ranks have not answered.
        timeout = 2 * (self._start_seconds + seconds)
        self._store = dist.TCPStore(  # type: ignore[attr-defined]  # torch's stubs lack it
            "127.0.0.1", 0, None, True, timedelta(seconds=timeout), wait_for_workers=False
        )
        self._options = {
            "world_size": num_ranks,
            "port": self._store.port,
            "device": device,
            "collectives": list(names),
            "timeout": timeout,
        }
        self._processes: list[subprocess.Popen[bytes]] = []
        self._outputs: list[IO[bytes]] = []

    def __enter__(self) -> "_Ranks":
        try:
            for rank in range(self._num_ranks):
                self._outputs.append(tempfile.TemporaryFile())
                self._processes.append(self._start(rank))
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def wait_for(self, name: str) -> CollectiveRow:
        """Let the ranks begin, and wait until all have answered, one has died, or the time is over.

        After an error, a second remains for the others.
        """
        self._store.set(go_key(name), "")
        start = time.monotonic()
        seconds = self._start_seconds if name == START else self._seconds
        deadline = start + seconds
        answers: dict[int, dict[str, Any]] = {}
        while True:
            is_over = time.monotonic() > deadline
            for rank in set(range(self._num_ranks)) - set(answers):
                if self._store.check([answer_key(name, rank)]):
                    answers[rank] = json.loads(self._store.get(answer_key(name, rank)))
                    if "error" in answers[rank]:
                        deadline = min(deadline, time.monotonic() + _AFTER_ERROR)
            errors = {rank: answer["error"] for rank, answer in answers.items() if "error" in answer}
            if len(answers) == self._num_ranks and not errors:
                return _succeeded(name, list(answers.values()), time.monotonic() - start)
            reason = self._describe_dead()
            if reason or is_over:
                reason = reason or _describe(errors) or self._describe_silent(set(answers), seconds)
                return CollectiveRow(name=name, state="failed", reason=reason)
            time.sleep(_PAUSE)

    def _start(self, rank: int) -> "subprocess.Popen[bytes]":
        return subprocess.Popen(
            [sys.executable, "-m", _RANK_MODULE, json.dumps(self._options | {"rank": rank})],
            stdin=subprocess.PIPE,  # the rank ends when this is closed, also if this process is killed
            stdout=self._outputs[rank],
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C reaches this process only, which ends the ranks
        )

    def _describe_dead(self) -> str:
        """Return which rank has died, how, and the last line that it printed; an empty text if none has."""
        for rank, process in enumerate(self._processes):
            status = process.poll()
            if status is not None:
                last = self._last_line(rank) if status > 0 else ""
                return f"rank {rank} died: {describe_status(status)}" + (f": {last}" if last else "")
        return ""

    def _describe_silent(self, answered: set[int], seconds: float) -> str:
        """Return which ranks have not answered in time."""
        silent = [rank for rank in range(self._num_ranks) if rank not in answered]
        stopped = [rank for rank in silent if self._is_stopped(rank)]
        if stopped:
            return f"no answer in {seconds:.0f} s: the process of {_name(stopped)} is stopped"
        return f"no answer in {seconds:.0f} s from {_name(silent)}"

    def _is_stopped(self, rank: int) -> bool:
        try:
            return psutil.Process(self._processes[rank].pid).status() == psutil.STATUS_STOPPED
        except psutil.Error:
            return False

    def _last_line(self, rank: int) -> str:
        output = self._outputs[rank]
        output.seek(0)
        lines = output.read().decode(errors="replace").strip().splitlines()
        return lines[-1].strip() if lines else ""

    def _end(self) -> None:
        for process in self._processes:
            process.kill()  # a rank has nothing to save, and may hang in a collective
        for process, output in zip(self._processes, self._outputs, strict=False):
            process.wait()
            if process.stdin is not None:
                process.stdin.close()
            output.close()


def _succeeded(name: str, answers: Sequence[Mapping[str, Any]], waited: float) -> CollectiveRow:
    if name == START:
        return CollectiveRow(name=name, state="ok", latency=waited)
    slowest = max(answer["small"] for answer in answers)
    if name in WITHOUT_DATA or len(answers) == 1:
        return CollectiveRow(name=name, state="ok", latency=slowest)
    bandwidth = LARGE_BYTES / max(answer["large"] for answer in answers)
    return CollectiveRow(name=name, state="ok", latency=slowest, bandwidth=bandwidth)


def _describe(errors: Mapping[int, str]) -> str:
    """Return the error of the lowest rank that reported one, and which others did; an empty text if none did."""
    if not errors:
        return ""
    first, *others = sorted(errors)
    also = f" ({_name(others)} failed as well)" if others else ""
    return f"rank {first}: {errors[first]}{also}"


def _name(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} others" if len(ranks) > 8 else "")
    return f"rank{'s' * (len(ranks) > 1)} {shown}"
