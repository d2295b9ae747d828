"""Check two ranks on one GPU: collectives, parity, hybrid sharding, checkpoints, and a rank that fails alone.

    python -m tests.gpu.two_on_one [--only NAME,...] [--device cpu|cuda] [--backend auto|nccl|staged] [--out DIR]

NCCL refuses a GPU that it finds twice on a host. Two processes first try whether it accepts the GPU if each has its own
NCCL_HOSTID. If not, or without a GPU, a backend that copies to the host, uses gloo and copies back takes its place.
Prints a line per check, and a table; writes DIR/two_on_one.json and .md. The exit code is 1 if any check failed.
`--only` takes names or prefixes, `--list` shows the names.
"""

import argparse
import itertools
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.contract.cases import CASES
from tests.gpu.all import PATIENCE, Build, Check, choose
from tests.gpu.crew import Crew, alone
from tests.gpu.pair import NUM_RANKS, environments
from tests.gpu.place import needs_operators
from tests.gpu.report import Report, Row, as_row

BUDGET_SECONDS = 570.0
ROOT = Path(__file__).parents[2]
ALGORITHMS = ("ring", "native", "reduce_broadcast", "all_to_all")
SAVED = ("paral_ddp", "paral_fsdp", "paral_zero2", "paral_zero3")
PARITY = tuple(case.label for case in CASES if NUM_RANKS in case.world_sizes)
_FAILING_SECONDS = 90.0
_counter = itertools.count()


def new_environments() -> list[dict[str, str]]:
    """Return the environments of a new pair of ranks, with a new port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return environments(free.getsockname()[1], f"two-on-one-{os.getpid()}-{next(_counter)}")


def checks(device: str, backend: str, folder: str) -> list[Check]:
    """Return the checks of two ranks, followed by those of one rank, which use what the two saved."""
    num_bytes = 25 * 2**20 if device == "cuda" else 2**18
    where = (device, backend)
    found = [
        Check("cpu_path", "pair:cpu_path", where),
        *(Check(f"reduce:{algorithm}", "pair:reduce", (algorithm, *where, num_bytes)) for algorithm in ALGORITHMS),
        *(Check(f"parity:{x}", "pair:parity", (x, *where), 90, needs_operators(x)) for x in PARITY),
        *(
            Check(f"model_parallel:{x}", "pair:model_parallel", (x, *where))
            for x in ("tensor", "pipeline", "frozen_stage")
        ),
        Check("manual_optimization", "pair:manual_optimization", where, 90),
        *(Check(f"save:{label}", "pair:save", (label, *where, folder)) for label in SAVED),
        *(Check(f"resume:{label}", "saved:resume", (label, device, folder, list(SAVED))) for label in SAVED),
        *(Check(f"failing:{name}", "failing", (name, *where), _FAILING_SECONDS) for name in ("ddp", "fsdp")),
    ]
    return sorted(found, key=lambda check: check.operators)


def find_backend(device: str, folder: Path, report: Report) -> str:
    """Return `"nccl"` if NCCL accepts two ranks on one GPU, else `"staged"`."""
    if device == "cpu":
        return "staged"
    crew = Crew(new_environments, folder, "probe")
    began = time.monotonic()
    answers = crew.call("tests.gpu.pair:probe", device, "nccl", 25 * 2**20, budget=100)
    crew.end()
    row = as_row("probe:nccl", time.monotonic() - began, answers)
    if row.status == "passed":
        report.add(row)
        return "nccl"
    # A refusal by NCCL is not our failure; its message is kept.
    report.add(Row("probe:nccl", "skipped", row.seconds, row.facts, f"{row.reason}\nNCCL refuses two ranks here"))
    return "staged"


def fail_alone(name: str, device: str, backend: str, folder: Path) -> Row:
    """Let rank 1 fail: both processes must end soon, rank 1 with its traceback, rank 0 with the reason."""
    began = time.monotonic()
    patience = PATIENCE[device] * _FAILING_SECONDS
    ranks = []
    for rank, added in enumerate(new_environments()):
        log = open(folder / f"failing-{name}-{rank}.log", "w")  # noqa: SIM115
        command = [sys.executable, "-m", "tests.gpu.failing", device, backend, name]
        environment = {**os.environ, **added}
        ranks.append((subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log), log))
    facts: dict[str, Any] = {}
    failures = []
    try:
        deadline = began + patience
        while any(process.poll() is None for process, _ in ranks) and time.monotonic() < deadline:
            for rank, (process, _) in enumerate(ranks):
                if process.poll() is not None:
                    facts.setdefault(f"rank {rank} ended after, s", round(time.monotonic() - began, 1))
            time.sleep(0.05)
    finally:
        for process, log in ranks:
            process.kill()
            process.wait(timeout=20)
            log.close()
    said = [(folder / f"failing-{name}-{rank}.log").read_text(errors="replace") for rank in range(NUM_RANKS)]
    for rank, (process, _) in enumerate(ranks):
        facts[f"code of rank {rank}"] = process.returncode
        if process.returncode == 0:
            failures.append(f"rank {rank} ended as if nothing had happened")
        if process.returncode == -9:
            failures.append(f"rank {rank} did not end in {patience:.0f} s")
    if "rank 1 fails alone" not in said[1] or "Traceback" not in said[1]:
        failures.append(f"rank 1 does not show its traceback: {said[1][-1500:]}")
    if "Rank 0 ended because rank 1" not in said[0] or "rank 1 fails alone" not in said[0]:
        failures.append(f"rank 0 does not say why it ended: {said[0][-1500:]}")
    facts["last words of rank 0"] = (said[0].strip().splitlines() or [""])[-1][:150]
    status = "failed" if failures else "passed"
    return Row(f"failing:{name}", status, time.monotonic() - began, facts, "\n".join(failures))


def run(chosen: Sequence[Check], device: str, backend: str, folder: Path, report: Report, budget: float) -> None:
    """Run the checks: most in a pair of ranks, resuming on one rank, failing in separate processes."""
    began = time.monotonic()
    build = Build(device, folder) if any(check.operators for check in chosen) else None
    pair, single = Crew(new_environments, folder, "rank"), Crew(alone, folder, "single")
    built: Row | None = None
    try:
        for check in chosen:
            left = budget - (time.monotonic() - began)
            if check.operators and built is None and build is not None:
                report.add(built := build.row(left))
            start = time.monotonic()
            if check.operators and built is not None and built.status != "passed":
                report.add(Row(check.name, "skipped", 0.0, reason=f"operators: {built.reason[-300:]}"))
            elif left < 5:
                report.add(Row(check.name, "skipped", 0.0, reason=f"no time left of {budget:.0f} s; use --only"))
            elif check.function == "failing":
                report.add(fail_alone(check.arguments[0], device, backend, folder))
            else:
                crew = single if check.function.startswith("saved:") else pair
                function = f"tests.gpu.{check.function}"
                answers = crew.call(function, *check.arguments, budget=min(PATIENCE[device] * check.budget, left))
                report.add(as_row(check.name, time.monotonic() - start, answers))
    finally:
        pair.end()
        single.end()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the checks that the command line selects; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="comma-separated names or prefixes")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--backend", choices=("auto", "nccl", "staged", "gloo"), default="auto")
    parser.add_argument("--out", type=Path, default=Path("gpu-report"))
    parser.add_argument("--budget", type=float, default=BUDGET_SECONDS, help="seconds for all checks")
    parser.add_argument("--list", action="store_true", help="print the names and stop")
    options = parser.parse_args(arguments)
    names = [name for name in options.only.split(",") if name]
    scratch = tempfile.mkdtemp(prefix="gpu-two-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None)
    try:
        chosen = choose(checks(options.device, options.backend, scratch), names)
        if options.list:
            print("\n".join(check.name for check in chosen))
            return 0
        if not chosen:
            parser.error(f"--only {options.only} names no check; --list shows them")
        about = {"command": " ".join(sys.argv), "device": options.device}
        report = Report("two_on_one", options.out, about)
        backend = options.backend
        if backend == "auto":
            backend = find_backend(options.device, options.out, report)
        report.about["backend"] = backend
        chosen = choose(checks(options.device, backend, scratch), names)
        run(chosen, options.device, backend, options.out, report, options.budget)
        return report.finish()
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
