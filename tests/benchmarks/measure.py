"""Run benchmarks again and write what they print into docs/measurements.md.

    python -m tests.benchmarks.measure          # all of them, which takes about two hours on two cores
    python -m tests.benchmarks.measure NAME...  # some of them
    python -m tests.benchmarks.measure --list

Times are only worth something on a machine that does nothing else.
"""

import argparse
import os
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from tests.docs.blocks import filled

PAGE = Path(__file__).parents[2] / "docs" / "measurements.md"
PYTHON = sys.executable
PROGRAMS = {
    "paral": [PYTHON, "-m", "lightning_paral"],
    "python": [PYTHON],
    "torchrun": [PYTHON, "-m", "torch.distributed.run"],
}


def _step(name: str, loop: str = "") -> tuple[str, ...]:
    return (f"torchrun --nproc-per-node 2 -m tests.benchmarks.steps {name}{loop}",)


PRINTING = (
    *("checkpoint", "memory", "fsdp_memory", "zero_memory", "activation_memory", "fsdp_traffic", "zero_traffic"),
    *("pipeline_schedules", "import_time"),
)
"""Modules of this folder that need no arguments."""
BENCHMARKS = {
    "all_reduce": tuple(f"python -m tests.benchmarks.all_reduce --nodes {n}" for n in (2, 4)),
    "all_reduce_loopback": tuple(
        f"torchrun --nproc-per-node {n} -m tests.benchmarks.all_reduce --algorithms ring,native --wire fp32"
        for n in (2, 4)
    ),
    "ddp_step": _step("paral_ddp"),
    "fsdp_step": _step("paral_fsdp"),
    "fsdp_step_direct": _step("paral_fsdp", " --loop 'torch fully_shard direct'"),
    **{f"zero{stage}_step": _step(f"paral_zero{stage}") for stage in (1, 2, 3)},
    "plan_13b": tuple(
        f"paral plan --config configs/gpt-13b.yaml --world-size 1 --device-memory {memory}GiB --strategies "
        "paral_zero2_offload,paral_zero3_offload"
        for memory in (32, 80, 139)
    ),
    "slow_link": tuple(
        f"python -m tests.benchmarks.slow_link{options}"
        for options in (
            "",
            " --rates 10gbit --periods 1000 --wire fp32",
            " --rates 10gbit --periods 5,10,25,50,100 --wire fp32 --tokens 512000 --plot docs/assets/slow-link.svg",
        )
    ),
    **{name: (f"python -m tests.benchmarks.{name}",) for name in PRINTING},
}
"""What a user types to see the results of each block of the page."""


def measured(name: str) -> str:
    """Run a benchmark; return the block of the page: what it prints, the commands, the date and the versions."""
    lines = BENCHMARKS[name]
    printed = "\n\n".join(_output(line).strip("\n").rstrip() for line in lines)
    versions = [f"Python {platform.python_version()}"]
    versions += [f"{library} {version(library)}" for library in ("torch", "lightning", "deepspeed")]
    machine = f"{', '.join(versions)}; {os.cpu_count()} CPU cores ({platform.machine()})"
    commands = "<br>\n".join(f"`{line}`" for line in lines)
    return f"```text\n{printed}\n```\n\n{commands}<br>\n{datetime.now(UTC):%Y-%m-%d}, {machine}"


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
        block = measured(name)
        print(f"{name}\n\n{block}\n", flush=True)
        PAGE.write_text(filled(PAGE, {name: block}))


if __name__ == "__main__":
    main()
