"""Run benchmarks again and write docs/measurements.md from their output.

    python -m tests.benchmarks.measure          # all of them, which takes about half an hour on two cores
    python -m tests.benchmarks.measure NAME...  # some of them
    python -m tests.benchmarks.measure --list

Times are only worth something on a machine that does nothing else.
"""

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.tables import write_json

RESULTS = Path(__file__).with_name("results.json")
PYTHON = sys.executable
PROGRAMS = {
    "paral": [PYTHON, "-m", "lightning_paral"],
    "python": [PYTHON],
    "torchrun": [PYTHON, "-m", "torch.distributed.run"],
}


def _step(name: str, loop: str = "") -> tuple[str, ...]:
    return (f"torchrun --nproc-per-node 2 -m tests.benchmarks.steps {name}{loop}",)


WITH_JSON = {
    "all_reduce": tuple(f"python -m tests.benchmarks.all_reduce --nodes {n}" for n in (2, 4)),
    "all_reduce_loopback": tuple(
        f"torchrun --nproc-per-node {n} -m tests.benchmarks.all_reduce --algorithms ring,native --wire fp32"
        for n in (2, 4)
    ),
    "ddp_step": _step("paral_ddp"),
    "fsdp_step": _step("paral_fsdp"),
    "fsdp_step_direct": _step("paral_fsdp", " --loop 'torch fully_shard direct'"),
    **{f"zero{stage}_step": _step(f"paral_zero{stage}") for stage in (1, 2, 3)},
    "checkpoint": ("python -m tests.benchmarks.checkpoint",),
    "memory": ("python -m tests.benchmarks.memory",),
    "plan_13b": tuple(
        f"paral plan --config configs/gpt-13b.yaml --world-size 1 --device-memory {memory}GiB --strategies "
        "paral_zero2_offload,paral_zero3_offload"
        for memory in (32, 80, 139)
    ),
}
"""Commands by benchmark. With `--json`, each prints one JSON object."""
PRINTING = ("fsdp_memory", "zero_memory", "activation_memory", "fsdp_traffic", "zero_traffic", "import_time")
"""Modules of this folder that print what is shown."""
BENCHMARKS = WITH_JSON | {name: (f"python -m tests.benchmarks.{name}",) for name in PRINTING}
"""What a user types to see the tables of each benchmark."""


def load() -> dict[str, Any]:
    """Return all results, by name."""
    found: dict[str, Any] = json.loads(RESULTS.read_text())
    return found


def store(name: str, record: dict[str, Any]) -> None:
    """Replace the results called `name`, with today's date, versions and machine."""
    versions = [f"Python {platform.python_version()}"]
    versions += [f"{library} {version(library)}" for library in ("torch", "lightning", "deepspeed")]
    measured_with = f"{', '.join(versions)}; {os.cpu_count()} CPU cores ({platform.machine()})"
    results = load() | {name: {"date": f"{datetime.now(UTC):%Y-%m-%d}", "with": measured_with, **record}}
    write_json(RESULTS, dict(sorted(results.items())))


def measured(name: str) -> dict[str, Any]:
    """Run a benchmark, and return what it prints."""
    if name in WITH_JSON:
        printed = [_output(f"{line} --json") for line in WITH_JSON[name]]
        return {"json": [json.loads(text[text.index("{") :]) for text in printed]}
    return {"printed": _output(BENCHMARKS[name][0]).strip("\n").rstrip()}


def _output(line: str) -> str:
    program, *arguments = shlex.split(line)
    command = [*PROGRAMS[program], *arguments]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=3600).stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="benchmarks to run")
    parser.add_argument("--list", action="store_true", help="print their names and commands")
    options = parser.parse_args()
    unknown = set(options.names) - set(BENCHMARKS)
    if unknown:
        parser.error(f"there is no benchmark {', '.join(sorted(unknown))}; --list prints all")
    if options.list:
        print("\n".join(f"{name:20} {' && '.join(lines)}" for name, lines in BENCHMARKS.items()))
        return
    for name in options.names or BENCHMARKS:
        record = measured(name)
        print(f"{name}\n\n{record.get('printed') or json.dumps(record, indent=2)}\n", flush=True)
        store(name, record)
    from tests.docs.generated import write_all

    write_all()


if __name__ == "__main__":
    main()
