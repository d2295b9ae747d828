"""Run a table of checks one after the other, in processes that are replaced when one fails, and print a report."""

import argparse
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.gpu.crew import Answer, Crew, alone
from tests.gpu.place import needs_operators
from tests.gpu.report import Report, Row, as_row

BUDGET_SECONDS = 570.0
PATIENCE = {"cuda": 1.0, "cpu": 5.0}
"""Factors on a check's budget: a machine without a GPU may be slow or busy."""
BUILD_SECONDS = 400.0


@dataclass(frozen=True)
class Check:
    """One check: a function of this folder, and its arguments."""

    name: str
    function: str
    arguments: tuple[Any, ...]
    budget: float = 60.0
    """Time limit in seconds."""
    crew: str = "single"
    """The processes that run it."""
    operators: bool = False
    """Whether the check needs DeepSpeed's compiled operators."""


def of_labels(
    kind: str, function: str, labels: Sequence[str], *more: Any, budget: float = 60.0, crew: str = "single"
) -> list[Check]:
    """Return a check for each label, called with the label and `more`."""
    return [
        Check(f"{kind}:{label}", function, (label, *more), budget, crew, needs_operators(label)) for label in labels
    ]


def choose(everything: Sequence[Check], names: Sequence[str]) -> list[Check]:
    """Return the checks with these names or prefixes, and those that save what they resume from."""
    known = {check.name for check in everything}
    beginnings = tuple(name for name in names if name not in known)
    chosen = {
        check.name
        for check in everything
        if not names or check.name in names or (beginnings and check.name.startswith(beginnings))
    }
    for check in everything:
        if check.name in chosen and check.function == "saved:resume":
            chosen |= {f"save:{source}" for source in check.arguments[-1]}
    return [check for check in everything if check.name in chosen]


class _Operators:
    """Compiles DeepSpeed's operators in a process of its own while the other checks run."""

    def __init__(self, device: str, folder: Path) -> None:
        self._crew, self._answers, self._seconds = Crew(alone, folder, "operators"), list[Answer](), 0.0
        self._began = time.monotonic()
        self._thread = threading.Thread(target=self._build, args=(device,), daemon=True)
        self._thread.start()

    def _build(self, device: str) -> None:
        function = "tests.gpu.surroundings:build_operators"
        self._answers = self._crew.call(function, device, budget=BUILD_SECONDS)
        self._seconds = time.monotonic() - self._began

    def row(self, patience: float) -> Row:
        """Wait for the compilation to end, and return its result."""
        self._thread.join(timeout=max(0.0, patience))
        if self._thread.is_alive():
            waited = time.monotonic() - self._began
            return Row("operators", "failed", waited, reason=f"still compiling after {waited:.0f} s")
        self._crew.end()
        return as_row("operators", self._seconds, self._answers)


def run(
    chosen: Sequence[Check], crews: Mapping[str, Crew], device: str, folder: Path, budget: float, report: Report
) -> None:
    """Run checks one after the other; those that need compiled operators come last."""
    deadline = time.monotonic() + budget
    operators = _Operators(device, folder) if any(check.operators for check in chosen) else None
    built: Row | None = None
    for check in sorted(chosen, key=lambda check: check.operators):
        if check.operators and operators is not None and built is None:
            report.add(built := operators.row(deadline - time.monotonic()))
        began = time.monotonic()
        most = min(PATIENCE[device] * check.budget, deadline - began)
        if check.operators and built is not None and built.status != "passed":
            report.add(Row(check.name, "skipped", 0.0, reason=f"operators: {built.reason[-300:]}"))
        elif most < 5:
            report.add(Row(check.name, "skipped", 0.0, reason=f"no time left of {budget:.0f} s; use --only"))
        else:
            answers = crews[check.crew].call(f"tests.gpu.{check.function}", *check.arguments, budget=most)
            report.add(as_row(check.name, time.monotonic() - began, answers))


def main(
    name: str,
    description: str | None,
    arguments: Sequence[str] | None,
    checks: Callable[[str, str], list[Check]],
    crews: Mapping[str, Callable[[], Sequence[Mapping[str, str]]]],
) -> int:
    """Run the checks that the command line selects; return the exit code.

    Args:
        name: the name of the program and of its reports.
        description: its help.
        arguments: the command line; `None` for that of this process.
        checks: returns all checks for a device and a folder for checkpoints, the most important first.
        crews: for each kind of processes that run checks, a function that returns the environment of each process.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="comma-separated names or prefixes")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--out", type=Path, default=Path("gpu-report"))
    parser.add_argument("--budget", type=float, default=BUDGET_SECONDS, help="seconds for all checks")
    parser.add_argument("--list", action="store_true", help="print the names and stop")
    options = parser.parse_args(arguments)
    # In a memory file system if there is one: checkpoints are small, and the disk is not under test.
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="gpu-", dir=memory, ignore_cleanup_errors=True) as scratch:
        names = [each for each in options.only.split(",") if each]
        chosen = choose(checks(options.device, scratch), names)
        if options.list:
            print("\n".join(check.name for check in chosen))
            return 0
        if not chosen:
            parser.error(f"--only {options.only} names no check; --list shows them")
        report = Report(name, options.out, {"command": " ".join(sys.argv), "device": options.device})
        started = {kind: Crew(environments, options.out, kind) for kind, environments in crews.items()}
        try:
            run(chosen, started, options.device, options.out, options.budget, report)
        finally:
            for crew in started.values():
                crew.end()
        return report.finish()
