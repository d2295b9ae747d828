"""Run benchmarks again and write docs/measurements.md from their output.

    python -m tests.benchmarks.measure          # all of them, which takes about an hour on two cores
    python -m tests.benchmarks.measure NAME...  # some of them
    python -m tests.benchmarks.measure --list

Times are only worth something on a machine that does nothing else.
"""

import argparse
import re
import subprocess
import sys
from dataclasses import dataclass

from tests.benchmarks import results

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

    def run(self) -> str:
        """Run it and return its standard output."""
        launcher = TORCHRUN if self.on_ranks else ("-m",)
        command = [sys.executable, *launcher, f"tests.benchmarks.{self.module}", *self.options]
        return (
            subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=3600)
            .stdout.strip("\n")
            .rstrip()
        )


BENCHMARKS = {
    "all_reduce": Benchmark("all_reduce"),
    "all_reduce_loopback": Benchmark("all_reduce", ("--loopback",)),
    "ddp_step": Benchmark("ddp_step", on_ranks=True),
    "fsdp_step": Benchmark("fsdp_step", on_ranks=True),
    "fsdp_step_direct": Benchmark("fsdp_step", ("--direct",), on_ranks=True),
    **{f"zero{stage}_step": Benchmark("zero_step", ("--stage", str(stage)), on_ranks=True) for stage in (1, 2, 3)},
    "dp_step": Benchmark("dp_step"),
    "fsdp_memory": Benchmark("fsdp_memory"),
    "zero_memory": Benchmark("zero_memory"),
    "activation_memory": Benchmark("activation_memory"),
    "from_pretrained": Benchmark("from_pretrained"),
    "fsdp_traffic": Benchmark("fsdp_traffic"),
    "zero_traffic": Benchmark("zero_traffic"),
    "sampling": Benchmark("sampling"),
    "checkpoint": Benchmark("checkpoint"),
    "import_time": Benchmark("import_time"),
}


def ratios_in(printed: str) -> dict[str, float]:
    """Return the ratios that the plot shows: of a step to the hand-written loop, and of the rows on saving."""
    step = re.search(r"ratio (\d+\.\d+)", printed)
    saves = re.findall(r"^(sharded save|async save).* (\d+\.\d+)$", printed, flags=re.MULTILINE)
    return {name: float(ratio) for name, ratio in [*([("step", step[1])] if step else []), *saves]}


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
        printed = BENCHMARKS[name].run()
        print(f"{name}\n\n{printed}\n", flush=True)
        results.store(name, {"printed": printed, "ratios": ratios_in(printed)})
    from tests.docs.generated import write_all

    write_all()


if __name__ == "__main__":
    main()
