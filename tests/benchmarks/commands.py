"""Commands that a user can run, whose JSON is stored as a result."""

import json
import shlex
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

PROGRAMS = {"paral": [sys.executable, "-m", "lightning_paral"], "python": [sys.executable]}


@dataclass(frozen=True)
class Commands:
    """Commands of `paral`, or of programs that call it. With `--json`, each prints one JSON object."""

    lines: tuple[str, ...]

    @property
    def command(self) -> str:
        """What a user types, to see tables."""
        return " && ".join(self.lines)

    def record(self) -> dict[str, Any]:
        """Run them, and return what they print."""
        return {"json": [self._run(line) for line in self.lines]}

    def _run(self, line: str) -> dict[str, Any]:
        program, *arguments = shlex.split(line)
        printed = subprocess.run(
            [*PROGRAMS[program], *arguments, "--json"], check=True, stdout=subprocess.PIPE, text=True, timeout=3600
        ).stdout
        found: dict[str, Any] = json.loads(printed[printed.index("{") :])
        return found


def step(*strategies: str) -> Commands:
    """Return the command that compares training steps of the example's GPT."""
    return Commands((f"paral bench step --config configs/gpt.yaml --strategies {','.join(strategies)}",))


COMM_SIZES = "--sizes 4MiB,25MiB"
"""Sizes between nodes: a layer, and a bucket of DDP."""
STEPS = {
    "ddp_step": step("paral_ddp", "raw_ddp"),
    "fsdp_step": step("paral_fsdp", "raw_fsdp"),
    "fsdp_step_direct": step("paral_fsdp", "raw_fsdp_direct"),
    **{f"zero{stage}_step": step(f"paral_zero{stage}", f"raw_zero{stage}") for stage in (1, 2, 3)},
}
COMM = {
    "all_reduce": Commands(
        tuple(f"python -m tests.benchmarks.all_reduce --nodes {n} {COMM_SIZES} --seconds 60" for n in (2, 4))
    ),
    "all_reduce_loopback": Commands(
        tuple(f"paral bench comm --ranks {n} {COMM_SIZES} --algorithms ring,native --wire fp32" for n in (2, 4))
    ),
}
OTHERS = {
    "checkpoint": Commands(
        ("paral bench checkpoint --config configs/gpt-200m.yaml --strategies paral_fsdp --rounds 3 --cold",)
    ),
    "memory": Commands(
        ("paral bench memory --model.width 1024 --model.num_layers 12 --data.batch_size 1 --data.context 64",)
    ),
    "adam": Commands(("paral bench adam --sizes 1M,10M,50M,200M --threads 1,2",)),
    "plan_13b": Commands(
        tuple(
            f"paral plan --config configs/gpt-13b.yaml --world-size 1 --device-memory {memory}GiB --strategies "
            "paral_zero2_offload,paral_zero3_offload"
            for memory in (32, 80, 139)
        )
    ),
}
