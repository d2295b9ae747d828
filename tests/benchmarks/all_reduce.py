"""Measure all-reduce algorithms next to the backend's own and to the limit of the link.

    python -m tests.benchmarks.all_reduce            # over links of 1 Gbit/s between nodes (needs root)
    python -m tests.benchmarks.all_reduce --loopback # inside one node, where memory copies are the limit

Every algorithm reduces in turn in each round, so that noise meets all alike; printed are medians over rounds.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from tabulate import tabulate

from lightning_paral.comm import ALL_REDUCE
from tests.network import joined_nodes

SIZES_MIB = (1, 4, 25)
RATE, BYTES_PER_SECOND = "1gbit", 125e6
ROOT = Path(__file__).parents[2]
CANDIDATES = [(name, None) for name in ("native", "ring", "reduce_broadcast", "all_to_all")] + [
    ("ring", torch.bfloat16),
    ("native", torch.bfloat16),
]


def label(name: str, wire_dtype: torch.dtype | None) -> str:
    return name if wire_dtype is None else f"{name} bf16 wire"


def measure(rounds: int) -> dict[str, dict[str, float]]:
    """Return median seconds by size and candidate. *Collective* over the default group."""
    medians: dict[str, dict[str, float]] = {}
    for size in SIZES_MIB:
        source = torch.randn(size * 1024 * 1024 // 4)
        seconds: dict[str, list[float]] = {}
        for number in range(rounds + 1):
            for name, wire_dtype in CANDIDATES:
                tensor = source.clone()
                dist.barrier()
                start = time.perf_counter()
                ALL_REDUCE[name](tensor, wire_dtype=wire_dtype)
                if number:  # the first round warms up
                    seconds.setdefault(label(name, wire_dtype), []).append(time.perf_counter() - start)
        medians[str(size)] = {name: statistics.median(values) for name, values in seconds.items()}
    return medians


def run_worker(rounds: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    medians = measure(rounds)
    if dist.get_rank() == 0:
        print(json.dumps(medians))
    dist.destroy_process_group()


def run_world(world_size: int, rounds: int, commands: list[list[str]], address: str, port: int, **extra: str) -> dict:
    processes = [
        subprocess.Popen(
            [*prefix, sys.executable, "-m", "tests.benchmarks.all_reduce", "--worker", "--rounds", str(rounds)],
            cwd=ROOT,
            env=os.environ
            | {"RANK": str(rank), "WORLD_SIZE": str(world_size), "MASTER_ADDR": address, "MASTER_PORT": str(port)}
            | {"OMP_NUM_THREADS": "1"}
            | extra,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for rank, prefix in enumerate(commands)
    ]
    outputs = [process.communicate(timeout=900)[0] for process in processes]
    return json.loads(outputs[0].splitlines()[-1])


def report(world_size: int, medians: dict[str, dict[str, float]], with_limit: bool) -> None:
    rows = []
    for size, by_candidate in medians.items():
        limit = 2 * (world_size - 1) / world_size * int(size) * 2**20 / BYTES_PER_SECOND
        for name, seconds in by_candidate.items():
            row = [size, name, seconds * 1e3, seconds / by_candidate["native"], seconds / by_candidate["ring"]]
            rows.append([*row, seconds / limit] if with_limit else row)
    headers = ["MiB", "algorithm", "ms", "/ native", "/ ring"] + (["/ limit"] if with_limit else [])
    print(f"\n{world_size} {'nodes at 1 Gbit/s' if with_limit else 'ranks on loopback'}, gloo, fp32")
    print(tabulate(rows, headers, floatfmt=".2f"), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--loopback", action="store_true")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--world-sizes", type=int, nargs="+", default=[2, 4])
    arguments = parser.parse_args()
    if arguments.worker:
        run_worker(arguments.rounds)
        return
    for world_size in arguments.world_sizes:
        if arguments.loopback:
            with socket.create_server(("", 0)) as server:
                port = server.getsockname()[1]
            medians = run_world(world_size, arguments.rounds, [[]] * world_size, "127.0.0.1", port)
        else:
            with joined_nodes(world_size, RATE) as nodes:
                commands = [nodes.command_on(node, []) for node in range(world_size)]
                medians = run_world(
                    world_size, arguments.rounds, commands, nodes.addresses[0], 29544, GLOO_SOCKET_IFNAME="eth0"
                )
        report(world_size, medians, with_limit=not arguments.loopback)


if __name__ == "__main__":
    main()
