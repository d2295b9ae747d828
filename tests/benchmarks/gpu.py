"""Benchmark one GPU: speed and memory of every strategy and of hand-written loops, the largest model, saves.

    python -m tests.benchmarks.gpu PART [--sizes 124M,1.3B,7B] [--only NAME,...] [--budget SECONDS] [--out DIR]

PART is one of
    steps    tokens per second, MFU and peak memory: medians over blocks of steps, which alternate between contestants
    largest  the largest GPT that trains, by bisection over the number of layers, with and without offload
    saves    how long a save stops training, in the foreground and in the background
    table    print the results in DIR/benchmarks.json, and measure nothing

All runs use bf16-mixed, fused AdamW, context 1024, and tokens generated on the device. Results are saved to
DIR/benchmarks.json after every measurement: running the same command again continues where its budget ran out.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.benchmarks.gpu_loops import contestants
from tests.benchmarks.gpu_models import SIZES
from tests.benchmarks.gpu_tables import tables
from tests.contract.cases import BY_LABEL
from tests.gpu.crew import Crew, alone
from tests.gpu.place import needs_operators
from tests.gpu.report import as_row, write_json

BUDGET_SECONDS = 560.0
NUM_STEPS = {"tiny": 3, "124M": 20, "1.3B": 8, "7B": 5}
ROUNDS = {"tiny": 2, "124M": 3, "1.3B": 2, "7B": 1}
SAVED = ("paral_ddp", "paral_fsdp", "paral_fsdp_offload", "paral_zero2", "paral_zero3")
LARGEST = ("torch", "paral_ddp", "paral_fsdp", "paral_fsdp_offload", "paral_zero2_offload", "paral_zero3_offload")
LARGEST_OF = {"cuda": "7B", "cpu": "tiny"}
_CPU_LIMIT_BYTES = 1_500_000
"""Limit on parameters, gradients and Adam's state where there is no GPU to run out of memory."""
_STATE_BYTES = 16
"""Bytes per fp32 parameter: the parameter, its gradient, Adam's two moments."""


class Results:
    """Results, saved to a file after every measurement."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.content: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}

    def of(self, part: str, *keys: str) -> Any:
        """Return the list under these keys; create it if it does not exist."""
        found = self.content.setdefault(part, {})
        for key in keys[:-1]:
            found = found.setdefault(key, {})
        return found.setdefault(keys[-1], [])

    def save(self) -> None:
        """Write the file."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_json(self.path, self.content)


class Session:
    """Runs measurements until its time is up."""

    def __init__(self, device: str, results: Results, budget: float) -> None:
        self.device, self.results = device, results
        self._deadline = time.monotonic() + budget
        self.failed = False
        self._crew = Crew(alone, results.path.parent, "benchmarks")
        self._pace = 0.0

    @property
    def left(self) -> float:
        """Return the seconds that are left."""
        return self._deadline - time.monotonic()

    def call(self, what: str, function: str, *arguments: Any, most: float) -> dict[str, Any] | None:
        """Return the result of a measurement, or why it has none; `None` if there was no time for it."""
        if self.left < min(most, 1.2 * self._pace):
            print(f"no time left for {what}: run the same command again", flush=True)
            return None
        began = time.monotonic()
        answers = self._crew.call(function, *arguments, budget=min(most, self.left))
        row = as_row(what, time.monotonic() - began, answers)
        if answers[0].status != "lost":
            self._pace = row.seconds
        found = dict(row.facts) if row.status == "passed" else {row.status: row.reason[-2000:]}
        if row.status == "failed" and self.left < 1:  # out of time, not a failure
            print(f"{what} was cut off: run the same command again with more time", flush=True)
            return None
        self.failed |= row.status == "failed"
        said = {key: value for key, value in found.items() if key not in ("seconds", "steps")}
        print(f"{what:45} {row.seconds:6.1f} s  {str(said)[-300:]}", flush=True)
        return found

    def end(self) -> None:
        """End the processes."""
        self._crew.end()


def measure_steps(session: Session, sizes: Sequence[str], names: Sequence[str]) -> None:
    """Measure blocks of steps, with all contestants in each round."""
    for size in sizes:
        for round_number in range(ROUNDS[size]):
            for name in names:
                blocks = session.results.of("steps", size, name)
                if len(blocks) > round_number or any("seconds" not in block for block in blocks):
                    continue
                if name == "paral_dp" and SIZES[size].recompute:
                    continue
                arguments = (name, size, session.device, NUM_STEPS[size])
                function = "tests.benchmarks.gpu_loops:measure"
                found = session.call(f"{size}, round {round_number + 1}: {name}", function, *arguments, most=200)
                if found is None:
                    return
                blocks.append(found)
                session.results.save()


def measure_largest(session: Session, names: Sequence[str]) -> None:
    """Find the largest number of layers that each contestant can train."""
    size = LARGEST_OF[session.device]
    for name in names:
        trials = session.results.of("largest", name)

        def fits(layers: int, name: str = name, trials: list[Any] = trials) -> bool | None:
            for trial in trials:
                if trial["layers"] == layers:
                    return bool(trial["fits"])
            found = _try(session, name, size, layers)
            if found is None:
                return None
            trials.append({"layers": layers, "fits": "seconds" in found, **found})
            session.results.save()
            return "seconds" in found

        if any("skipped" in trial for trial in trials):
            continue
        first = 2 if session.device == "cpu" else 24
        bisect(fits, first)


def _try(session: Session, name: str, size: str, layers: int) -> dict[str, Any] | None:
    num_bytes = _STATE_BYTES * replace(SIZES[size], num_layers=layers).num_parameters
    what = f"{name}, {layers} layers, {num_bytes / 1e9:.1f} GB of state"
    if session.device == "cpu" and num_bytes > _CPU_LIMIT_BYTES:
        return {"out_of_memory": "as if"}
    room = host_bytes()
    if "offload" in name and num_bytes > 0.9 * room:
        print(f"{what}: no room on the host, {room / 1e9:.1f} GB", flush=True)
        return {"out_of_memory": f"host, {room / 1e9:.1f} GB"}
    return session.call(what, "tests.benchmarks.gpu_loops:measure", name, size, session.device, 2, layers, most=200)


def bisect(fits: Callable[[int], bool | None], first: int, resolution: float = 0.05) -> int | None:
    """Return the largest number that fits, to within `resolution`; `None` if `fits` gave up.

    Args:
        fits: whether a number fits, which all smaller numbers then do; `None` gives up.
        first: the number to start with.
        resolution: the fraction by which the result may be too low.
    """
    low, high = 0, first
    while fit := fits(high):
        low, high = high, high * 2 if low == 0 else high + max(1, high - low)
        if high > 1000 * first:
            return low
    if fit is None:
        return None
    while high - low > max(1, int(resolution * high)):
        middle = (low + high) // 2
        fit = fits(middle)
        if fit is None:
            return None
        low, high = (middle, high) if fit else (low, middle)
    return low


def host_bytes() -> int:
    """Return the bytes of host memory available to this process."""
    available = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemAvailable"))
    room = int(available.split()[1]) * 1024
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.exists() and limit.read_text().strip().isdigit():
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        statistics = dict(line.split() for line in Path("/sys/fs/cgroup/memory.stat").read_text().splitlines())
        used -= int(statistics.get("inactive_file", 0))  # freed when memory is needed
        room = min(room, int(limit.read_text()) - used)
    return room


def measure_saves(session: Session, sizes: Sequence[str], names: Sequence[str]) -> None:
    """Measure saves under strategies, and `torch.save` under DDP, whose state is that of a hand-written loop."""
    for size in sizes:
        for name in names:
            for how in ("sync", "async", *(["torch.save"] if name == "paral_ddp" else [])):
                found = session.results.of("saves", size, name, how)
                if found:
                    continue
                function = "tests.benchmarks.gpu_saves:measure_saves"
                arguments = (name, how, size, session.device)
                measured = session.call(f"{size}: {name}, {how}", function, *arguments, most=240)
                if measured is None:
                    return
                found.append(measured)
                session.results.save()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the measurements that the command line selects; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("steps", "largest", "saves", "table"))
    parser.add_argument("--sizes", default="124M,1.3B,7B", help=f"of {', '.join(SIZES)}")
    parser.add_argument("--only", default="", help="comma-separated contestants")
    parser.add_argument(
        "--offload", action="store_true", help="in `steps`, include contestants with the optimizer on the host"
    )
    parser.add_argument("--budget", type=float, default=BUDGET_SECONDS, help="seconds")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--out", type=Path, default=Path("gpu-report"))
    options = parser.parse_args(arguments)
    # Keep the allocator from fragmenting memory between blocks of different contestants.
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    os.environ.setdefault("PARAL_NVME_PATH", "/tmp")
    options.out.mkdir(parents=True, exist_ok=True)
    results = Results(options.out / "benchmarks.json")
    sizes = options.sizes.split(",")
    session = Session(options.device, results, options.budget)
    try:
        if "versions" not in results.content:
            found = session.call("versions", "tests.gpu.surroundings:versions", options.device, most=60) or {}
            results.content |= {"versions": found, "gpu": found.get("GPU", "")}
        known = {"steps": contestants(options.device), "largest": LARGEST, "saves": SAVED, "table": ()}[options.part]
        names = options.only.split(",") if options.only else list(known)
        if unknown := [name for name in names if name not in contestants(options.device)]:
            parser.error(f"--only: {', '.join(unknown)} is none of {', '.join(contestants(options.device))}")
        if options.part == "steps":
            if not options.only and not options.offload:
                names = [name for name in names if name not in BY_LABEL or not needs_operators(name)]
            measure_steps(session, sizes, names)
        elif options.part == "largest":
            measure_largest(session, names)
        elif options.part == "saves":
            measure_saves(session, sizes, names)
    finally:
        session.end()
    results.content.setdefault("commands", []).append(" ".join(sys.argv))
    results.save()
    results.path.with_suffix(".md").write_text(tables(results.content) + "\n")
    part = {"gpu": results.content["gpu"], options.part: results.content.get(options.part, {})}
    printed = tables(results.content if options.part == "table" else part)
    print(f"\n{printed}\n\n{results.path}", flush=True)
    return 1 if session.failed else 0


if __name__ == "__main__":
    sys.exit(main())
