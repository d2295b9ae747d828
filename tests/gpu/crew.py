"""Processes that run checks in turn, and are replaced when one of them fails, dies or does not answer.

The main program never uses the GPU, so that later checks run whatever a check does to its process. Processes are
forked from a server that has imported the package once: starting one takes a fraction of a second.
"""

import contextlib
import faulthandler
import importlib
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

START_SECONDS = 120.0
LINGER_SECONDS = 5.0
"""Time for the other ranks to report after one has failed."""
_TAIL = 4000
_PRELOADED = ["lightning.pytorch", "lightning_paral", "tests.contract.cases"]


class Skipped(Exception):  # noqa: N818
    """Raised by a check that cannot run here; says why."""


def alone() -> list[Mapping[str, str]]:
    """Return the environment of a crew of one: this process's own."""
    return [{}]


@dataclass(frozen=True)
class Answer:
    """A rank's answer to a call."""

    status: str
    """`"returned"`, `"skipped"`, `"raised"`, or `"lost"`: it died or did not answer in time."""
    value: Any
    """The result, the reason, or the traceback with the end of its output."""


class Crew:
    """One process per environment; a call runs the same function in all of them.

    Args:
        environments: returns the variables to add to this process's environment, by rank; called for each new crew.
        folder: folder for the output of the processes, `NAME-RANK.log`.
        name: name of the log files.
    """

    def __init__(self, environments: Callable[[], Sequence[Mapping[str, str]]], folder: Path, name: str) -> None:
        self._environments = environments
        self._folder = folder
        self._name = name
        self._members: list[tuple[Any, Connection]] = []
        # If the server initialized CUDA, no process forked from it could use CUDA.
        os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(_PRELOADED)

    def call(self, function: str, *arguments: Any, budget: float) -> list[Answer]:
        """Call `module:function` with `arguments` on all ranks, for `budget` seconds at most."""
        patience = budget
        if not self._members:
            self._start()
            patience += START_SECONDS
        for _, connection in self._members:
            with contextlib.suppress(OSError):  # it has ended: `_collect` reports that
                connection.send((function, arguments))
        answers = self._collect(patience)
        if any(answer.status in ("raised", "lost") for answer in answers):
            self.end()
        return answers

    def end(self) -> None:
        """End the processes; the next call starts new ones."""
        for process, connection in self._members:
            connection.close()
            process.kill()
        for process, _ in self._members:
            process.join(timeout=10)
        self._members = []

    def _log(self, rank: int) -> Path:
        return self._folder / f"{self._name}-{rank}.log"

    def _start(self) -> None:
        for rank, added in enumerate(self._environments()):
            ours, theirs = self._context.Pipe()
            environment = {**os.environ, **added}
            process = self._context.Process(
                target=_serve, args=(theirs, environment, str(self._log(rank))), daemon=True
            )
            process.start()
            theirs.close()
            self._members.append((process, ours))

    def _collect(self, patience: float) -> list[Answer]:
        answers: dict[int, Answer] = {}
        deadline = time.monotonic() + patience
        while len(answers) < len(self._members) and time.monotonic() < deadline:
            silent = {self._members[rank][1]: rank for rank in range(len(self._members)) if rank not in answers}
            for connection in wait(list(silent), timeout=max(0.0, min(0.5, deadline - time.monotonic()))):
                rank = silent[connection]
                try:
                    answers[rank] = Answer(*connection.recv())
                except (EOFError, OSError):
                    process = self._members[rank][0]
                    process.join(timeout=5)
                    answers[rank] = Answer("lost", f"The process ended, code {process.exitcode}.\n{self._tail(rank)}")
                if answers[rank].status in ("raised", "lost"):
                    deadline = min(deadline, time.monotonic() + LINGER_SECONDS)
        for rank in range(len(self._members)):
            if rank not in answers:
                answers[rank] = Answer("lost", f"No answer in {patience:.0f} s.\n{self._stacks(rank)}")
        return [answers[rank] for rank in range(len(self._members))]

    def _stacks(self, rank: int) -> str:
        """Make a hanging process write the stacks of its threads and end; return the end of its output."""
        process = self._members[rank][0]
        if process.is_alive():
            os.kill(process.pid, signal.SIGABRT)  # which, unlike SIGUSR1, no strategy handles
            deadline = time.monotonic() + LINGER_SECONDS
            while "(most recent call first)" not in self._tail(rank) and time.monotonic() < deadline:
                process.join(timeout=0.1)
            process.join(timeout=0.5)  # the rest of what it writes
        return self._tail(rank)

    def _tail(self, rank: int) -> str:
        path = self._log(rank)
        return path.read_text(errors="replace")[-_TAIL:] if path.exists() else ""


def _serve(connection: Connection, environment: dict[str, str], log: str) -> None:
    """Answer calls until the pipe is closed. Runs in each process of a crew."""
    os.environ.clear()
    os.environ.update(environment)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    faulthandler.enable()
    if Path("/dev/nvidiactl").exists():
        with contextlib.suppress(
            OSError
        ):  # if the host runs out of memory, the kernel ends this process, not the main program
            Path("/proc/self/oom_score_adj").write_text("1000")
    # A daemonic process may not start processes, but a loader with workers does. The workers are daemons as well.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    while True:
        try:
            function, arguments = connection.recv()
        except (EOFError, OSError):
            return
        print(f"--- {function}{arguments}", flush=True)
        try:
            module, name = function.split(":")
            answer = ("returned", getattr(importlib.import_module(module), name)(*arguments))
        except Skipped as reason:
            answer = ("skipped", str(reason))
        except BaseException:
            answer = ("raised", traceback.format_exc())
        connection.send(answer)
