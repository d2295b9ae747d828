"""Check two ranks on one GPU: collectives, parity, hybrid sharding, checkpoints, and a rank that fails alone.

    python -m tests.gpu.two_on_one [--only NAME,...] [--device cpu|cuda] [--out DIR]

NCCL refuses a GPU that it finds twice on a host, so each rank has an NCCL_HOSTID of its own; with several GPUs, each
has a GPU of its own instead. Prints a line per check, and a table; writes DIR/two_on_one.json and .md. The exit code is
1 if any check failed. `--only` takes names or prefixes, `--list` shows the names.
"""

import itertools
import os
import sys
from collections.abc import Sequence

import torch

from tests.contract.cases import CASES
from tests.gpu.crew import alone
from tests.gpu.place import Facts
from tests.gpu.program import Check, main, of_labels
from tests.launching import free_port, run_together

NUM_RANKS = 2
ALGORITHMS = ("ring", "native", "reduce_broadcast", "all_to_all")
SAVED = ("paral_ddp", "paral_fsdp", "paral_zero2", "paral_zero3")
PARITY = tuple(case.label for case in CASES if NUM_RANKS in case.world_sizes)
_FAILING_SECONDS = 90.0
_counter = itertools.count()


def pair() -> list[dict[str, str]]:
    """Return the environment of each rank of a new pair, which makes it a separate node with one device."""
    name, port = f"two-on-one-{os.getpid()}-{next(_counter)}", free_port()
    shared = {"TORCHELASTIC_RUN_ID": name, "WORLD_SIZE": f"{NUM_RANKS}", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}"}
    shared |= {"NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo"}
    several = torch.cuda.device_count() >= NUM_RANKS
    return [
        shared
        | {"RANK": f"{rank}", "GROUP_RANK": f"{rank}", "NODE_RANK": f"{rank}"}
        | ({"CUDA_VISIBLE_DEVICES": f"{rank}"} if several else {"NCCL_HOSTID": f"{name}-{rank}"})
        for rank in range(NUM_RANKS)
    ]


def checks(device: str, folder: str) -> list[Check]:
    """Return the checks of two ranks, followed by those of one rank, which use what the two saved."""
    num_bytes = 25 * 2**20 if device == "cuda" else 2**18
    return [
        Check("cpu_path", "surroundings:cpu_path", (device,), 100, "pair"),
        *of_labels("reduce", "surroundings:reduce", ALGORITHMS, device, num_bytes, crew="pair"),
        *of_labels("parity", "numbers:parity", PARITY, device, budget=90, crew="pair"),
        *of_labels("modules", "numbers:modules", ("paral_fsdp", "paral_zero3"), device, budget=120, crew="pair"),
        *of_labels(
            "model_parallel", "numbers:model_parallel", ("tensor", "pipeline", "frozen_stage"), device, crew="pair"
        ),
        Check("manual_optimization", "numbers:manual_optimization", (device,), 90, "pair"),
        *of_labels("save", "saved:save", SAVED, device, folder, crew="pair"),
        *of_labels("resume", "saved:resume", SAVED, device, folder, list(SAVED)),
        *of_labels("failing", "two_on_one:fail_alone", ("ddp", "fsdp"), device, budget=_FAILING_SECONDS + 15),
    ]


def fail_alone(name: str, device: str) -> Facts:
    """Let rank 1 fail: both processes must end soon, rank 1 with its traceback, rank 0 with the reason."""
    command = [sys.executable, "-m", "tests.gpu.failing", device, name]
    ended = run_together([command] * NUM_RANKS, pair(), timeout=_FAILING_SECONDS)
    facts = Facts()
    for rank, end in enumerate(ended):
        facts |= {f"rank {rank} ended after, s": round(end.seconds, 1), f"code of rank {rank}": end.code}
        facts.require(end.code not in (0, -9), f"rank {rank} ended with {end.code} after {end.seconds:.0f} s")
    why, traceback = ended[0].printed, ended[1].printed
    told = "rank 1 fails alone" in traceback and "Traceback" in traceback
    facts.require(told, f"rank 1 does not show its traceback: {traceback[-1500:]}")
    told = "Rank 0 ended because rank 1" in why and "rank 1 fails alone" in why
    facts.require(told, f"rank 0 does not say why it ended: {why[-1500:]}")
    return facts


def run(arguments: Sequence[str] | None = None) -> int:
    return main("two_on_one", __doc__, arguments, checks, {"pair": pair, "single": alone})


if __name__ == "__main__":
    sys.exit(run())
