"""Run benchmarks again and write docs/measurements.md from their output.

    python -m tests.benchmarks.measure          # all of them, which takes about an hour on two cores
    python -m tests.benchmarks.measure NAME...  # some of them
    python -m tests.benchmarks.measure --list

Times are only worth something on a machine that does nothing else.
"""

import argparse
import json
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

from tests.benchmarks import commands, results
from tests.benchmarks.commands import Commands

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m")


@dataclass(frozen=True)
class Benchmark:
    """A benchmark of this folder."""

    module: str
    options: tuple[str, ...] = ()
    on_ranks: bool = False

    @property
    def command(self) -> str:
        """The command that runs it."""
        launcher = "torchrun --nproc-per-node 2 -m" if self.on_ranks else "python -m"
        return " ".join([launcher, f"tests.benchmarks.{self.module}", *self.options])

    def record(self) -> dict[str, Any]:
        """Run it and return its standard output."""
        launcher = TORCHRUN if self.on_ranks else ("-m",)
        command = [sys.executable, *launcher, f"tests.benchmarks.{self.module}", *self.options]
        process = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=3600)
        return {"printed": process.stdout.strip("\n").rstrip()}


BENCHMARKS: dict[str, Benchmark | Commands] = {
    **commands.COMM,
    **commands.STEPS,
    **commands.OTHERS,
    "dp_step": Benchmark("dp_step"),
    "tensor_step": Benchmark("tensor_step"),
    "pipeline_step": Benchmark("pipeline_step"),
    "pipeline_memory": Benchmark("pipeline_memory"),
    "fsdp_memory": Benchmark("fsdp_memory"),
    "zero_memory": Benchmark("zero_memory"),
    "activation_memory": Benchmark("activation_memory"),
    "from_pretrained": Benchmark("from_pretrained"),
    "fsdp_traffic": Benchmark("fsdp_traffic"),
    "zero_traffic": Benchmark("zero_traffic"),
    "sampling": Benchmark("sampling"),
    "zero_to_fp32": Benchmark("zero_to_fp32"),
    "step_time": Benchmark("step_time"),
    "import_time": Benchmark("import_time"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="benchmarks to run")
    parser.add_argument("--list", action="store_true", help="print their names and commands")
    options = parser.parse_args()
    unknown = set(options.names) - set(BENCHMARKS)
    if unknown:
        parser.error(f"there is no benchmark {', '.join(sorted(unknown))}; --list prints all")
    if options.list:
        print("\n".join(f"{name:20} {benchmark.command}" for name, benchmark in BENCHMARKS.items()))
        return
    for name in options.names or BENCHMARKS:
        record = BENCHMARKS[name].record()
        print(f"{name}\n\n{record.get('printed') or json.dumps(record, indent=2)}\n", flush=True)
        results.store(name, record)
    from tests.docs.generated import write_all

    write_all()


if __name__ == "__main__":
    main()
