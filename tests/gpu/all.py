"""Check every strategy on one rank with one GPU, in ten minutes.

    python -m tests.gpu.all [--only NAME,...] [--device cpu|cuda] [--out DIR]

Prints a line as each check ends, and a table at the end. Writes DIR/all.json, which is valid at any time, and
DIR/all.md. A check that fails, crashes or hangs does not stop the others. The exit code is 1 if any failed. `--list`
shows the names; `--only` takes prefixes, so that `--only fit,sync` runs `fit:paral_ddp` and so on.
"""

import argparse
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.gpu.crew import Answer, Crew, alone
from tests.gpu.place import ONE_RANK, needs_operators
from tests.gpu.report import Report, Row, as_row
from tests.gpu.saved import ASYNC

BUDGET_SECONDS = 570.0
PATIENCE = {"cuda": 1.0, "cpu": 5.0}
"""Factors on a check's budget: a machine without a GPU may be slow or busy."""
BUILD_SECONDS = 400.0
STRATEGY_LABELS = tuple(label for label in ONE_RANK if label.startswith("paral_"))
SAVED = ("paral_ddp", "paral_fsdp_offload", "paral_zero3")
"""Strategies whose checkpoints every strategy resumes from, besides its own."""


@dataclass(frozen=True)
class Check:
    """One check: a function of this folder, and its arguments."""

    name: str
    function: str
    arguments: tuple[Any, ...]
    budget: float = 60.0
    """Time limit in seconds."""
    operators: bool = False
    """Whether the check needs DeepSpeed's compiled operators."""


def checks(device: str, folder: str, *, full: bool) -> list[Check]:
    """Return all checks, the most important first; those that need compiled operators come last."""
    found = [
        Check("versions", "surroundings:versions", (device,)),
        Check("group:bound", "surroundings:process_group", (device, True)),
        Check("group:unbound", "surroundings:process_group", (device, False)),
        *(_of_label("fit", "numbers:parity", label, device) for label in ONE_RANK),
        *(_of_label("sync", "syncs:waits", label, device) for label in STRATEGY_LABELS),
        *(_of_label("precision", "numbers:precisions", label, device, budget=90) for label in STRATEGY_LABELS),
        *(_of_label("clip", "numbers:clipping", label, device) for label in STRATEGY_LABELS),
        *(_of_label("memory", "memory:left_behind", label, device) for label in STRATEGY_LABELS),
        Check("activation_offload", "memory:activation_offload", (device,), 120),
        Check("backend", "numbers:named_backend", (device,)),
        *(_of_label("async", "saved:async_save", label, device, folder) for label in ASYNC),
        *(_of_label("save", "saved:save", label, device, folder) for label in STRATEGY_LABELS),
    ]
    for label in STRATEGY_LABELS:
        sources = list(STRATEGY_LABELS) if full else list(dict.fromkeys([*SAVED, label]))
        # The checkpoints that it resumes from may be saved late.
        found.append(_of_label("resume", "saved:resume", label, device, folder, sources, budget=120))
    found += [
        _of_label("modules", "numbers:modules", label, device, budget=120)
        for label in ("paral_ddp", "paral_fsdp", "paral_fsdp_offload", "paral_zero2", "paral_zero3", "paral_dp")
    ]
    return sorted(found, key=lambda check: check.operators)


def _of_label(kind: str, function: str, label: str, device: str, *more: Any, budget: float = 60.0) -> Check:
    return Check(f"{kind}:{label}", function, (label, device, *more), budget, needs_operators(label))


def choose(everything: Sequence[Check], names: Sequence[str]) -> list[Check]:
    """Return the checks with these names or prefixes, and those that save what they resume from."""
    known = {check.name for check in everything}
    whole = {name for name in names if name in known}
    beginnings = tuple(name for name in names if name not in known)
    chosen = {
        check.name
        for check in everything
        if not names or check.name in whole or (beginnings and check.name.startswith(beginnings))
    }
    for check in everything:
        if check.name in chosen and check.function == "saved:resume":
            chosen |= {f"save:{source}" for source in check.arguments[-1]}
    return [check for check in everything if check.name in chosen]


class Build:
    """Compiles DeepSpeed's operators in a process of its own while the other checks run."""

    def __init__(self, device: str, folder: Path) -> None:
        self._crew = Crew(alone, folder, "operators")
        self._answers: list[Answer] = []
        self._seconds = 0.0
        self._thread = threading.Thread(target=self._build, args=(device,), daemon=True)
        self._began = time.monotonic()
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


def run(chosen: Sequence[Check], device: str, folder: Path, budget: float) -> int:
    """Run checks one after the other; return the exit code."""
    began = time.monotonic()
    report = Report("all", folder, {"command": " ".join(sys.argv), "device": device})
    build = Build(device, folder) if any(check.operators for check in chosen) else None
    crew = Crew(alone, folder, "all")
    built: Row | None = None
    try:
        for check in chosen:
            if check.operators and built is None and build is not None:
                built = build.row(budget - (time.monotonic() - began))
                report.add(built)
            left = budget - (time.monotonic() - began)
            if check.operators and built is not None and built.status != "passed":
                report.add(Row(check.name, "skipped", 0.0, reason=f"operators: {built.reason[-300:]}"))
            elif left < 5:
                report.add(Row(check.name, "skipped", 0.0, reason=f"no time left of {budget:.0f} s; use --only"))
            else:
                start = time.monotonic()
                answers = crew.call(
                    f"tests.gpu.{check.function}", *check.arguments, budget=min(PATIENCE[device] * check.budget, left)
                )
                report.add(as_row(check.name, time.monotonic() - start, answers))
    finally:
        crew.end()
    return report.finish()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the checks that the command line selects; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="comma-separated names or prefixes")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--out", type=Path, default=Path("gpu-report"))
    parser.add_argument("--budget", type=float, default=BUDGET_SECONDS, help="seconds for all checks")
    parser.add_argument("--full", action="store_true", help="resume every strategy from every other")
    parser.add_argument("--list", action="store_true", help="print the names and stop")
    options = parser.parse_args(arguments)
    # In a memory file system if there is one: checkpoints are small, and the disk is not under test.
    scratch = tempfile.mkdtemp(prefix="gpu-all-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None)
    try:
        everything = checks(options.device, scratch, full=options.full)
        chosen = choose(everything, [name for name in options.only.split(",") if name])
        if options.list:
            print("\n".join(check.name for check in chosen))
            return 0
        if not chosen:
            parser.error(f"--only {options.only} names no check; --list shows them")
        return run(chosen, options.device, options.out, options.budget)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
