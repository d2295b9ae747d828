"""Benchmark one GPU: speed and memory of every strategy and of hand-written loops.

    python -m tests.benchmarks.gpu PART [--sizes 124M,1.3B] [--only NAME,...] [--budget SECONDS] [--out DIR]

PART is one of
    steps    tokens per second, MFU and peak memory: medians over blocks of steps, which alternate between contestants
    table    print the results in DIR/benchmarks.json, and measure nothing

All runs use bf16-mixed, fused AdamW, context 1024, and tokens generated on the device. Results are saved to
DIR/benchmarks.json after every measurement: running the same command again continues where its budget ran out.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.benchmarks.gpu_loops import CONTESTANTS
from tests.benchmarks.gpu_models import SIZES
from tests.benchmarks.gpu_tables import tables
from tests.gpu.crew import Crew, alone
from tests.gpu.place import needs_operators
from tests.gpu.report import as_row
from tests.tables import write_json

BUDGET_SECONDS = 560.0
NUM_STEPS = {"tiny": 3, "124M": 20, "1.3B": 8}
ROUNDS = {"tiny": 2, "124M": 3, "1.3B": 2}


class NoTimeError(Exception):
    """There is no time left for a measurement."""


class Session:
    """Runs measurements until its time is up, and saves the results to a file after every one."""

    def __init__(self, device: str, path: Path, budget: float) -> None:
        self.device, self._path = device, path
        self.content: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        self.failed = False
        self._deadline = time.monotonic() + budget
        self._pace = 0.0
        self._crew = Crew(alone, path.parent, "benchmarks")

    def found(self, part: str, *keys: str) -> list[dict[str, Any]]:
        """Return the list of results under these keys, which is created if it does not exist."""
        place = self.content.setdefault(part, {})
        for key in keys[:-1]:
            place = place.setdefault(key, {})
        results: list[dict[str, Any]] = place.setdefault(keys[-1], [])
        return results

    def save(self) -> None:
        write_json(self._path, self.content)

    def call(self, what: str, function: str, *arguments: Any, most: float) -> dict[str, Any]:
        """Return the result of a measurement, or why it has none.

        Raises:
            NoTimeError: there was no time for it.
        """
        began = time.monotonic()
        left = self._deadline - began
        if left < min(most, 1.2 * self._pace):
            raise NoTimeError(f"no time left for {what}")
        answers = self._crew.call(function, *arguments, budget=min(most, left))
        row = as_row(what, time.monotonic() - began, answers)
        if answers[0].status != "lost":
            self._pace = row.seconds
        if row.status == "failed" and self._deadline - time.monotonic() < 1:
            raise NoTimeError(f"{what} was cut off")
        self.failed |= row.status == "failed"
        found = dict(row.facts) if row.status == "passed" else {row.status: row.reason[-2000:]}
        said = {key: value for key, value in found.items() if key not in ("seconds", "steps")}
        print(f"{what:45} {row.seconds:6.1f} s  {str(said)[-300:]}", flush=True)
        return found

    def end(self) -> None:
        self._crew.end()


def measure_steps(session: Session, sizes: Sequence[str], names: Sequence[str]) -> None:
    """Measure blocks of steps, with all contestants in each round."""
    for size in sizes:
        for number in range(ROUNDS[size]):
            for name in names:
                blocks = session.found("steps", size, name)
                if len(blocks) > number or any("seconds" not in block for block in blocks):
                    continue
                if name == "paral_dp" and SIZES[size].recompute:
                    continue
                call = ("tests.benchmarks.gpu_loops:measure", name, size, session.device, NUM_STEPS[size])
                blocks.append(session.call(f"{size}, round {number + 1}: {name}", *call, most=200))
                session.save()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the measurements that the command line selects; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("steps", "table"))
    parser.add_argument("--sizes", default="124M,1.3B", help=f"of {', '.join(SIZES)}")
    parser.add_argument("--only", default="", help="comma-separated contestants; by default `steps` has no offload")
    parser.add_argument("--budget", type=float, default=BUDGET_SECONDS, help="seconds")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--out", type=Path, default=Path("gpu-report"))
    options = parser.parse_args(arguments)
    sizes, names = options.sizes.split(","), [name for name in options.only.split(",") if name]
    if unknown := [name for name in names if name not in CONTESTANTS]:
        parser.error(f"--only: {', '.join(unknown)} is none of {', '.join(CONTESTANTS)}")
    # Keep the allocator from fragmenting memory between blocks of different contestants.
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    os.environ.setdefault("PARAL_NVME_PATH", "/tmp")
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "benchmarks.json"
    session = Session(options.device, path, options.budget)
    try:
        if "versions" not in session.content:
            found = session.call("versions", "tests.gpu.surroundings:versions", options.device, most=60)
            session.content |= {"versions": found, "gpu": found.get("GPU", "")}
        if options.part == "steps":
            measure_steps(session, sizes, names or [name for name in CONTESTANTS if not needs_operators(name)])
    except NoTimeError as error:
        print(f"{error}: run the same command again", flush=True)
    finally:
        session.end()
    session.content.setdefault("commands", []).append(" ".join(sys.argv))
    session.save()
    path.with_suffix(".md").write_text(tables(session.content) + "\n")
    print(f"\n{tables(session.content)}\n\n{path}", flush=True)
    return 1 if session.failed else 0


if __name__ == "__main__":
    sys.exit(main())
