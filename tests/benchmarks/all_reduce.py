"""Times of collectives by algorithm, dtype on the wire and size, and the bytes that each rank sends.

    torchrun --nproc-per-node 2 -m tests.benchmarks.all_reduce --sizes 64KiB,1MiB
    python -m tests.benchmarks.all_reduce --nodes 4 --sizes 4MiB,25MiB

With `--nodes`, each rank is a node of its own, a network namespace with a link of 1 Gbit/s, which needs root. Rounds
over all algorithms take turns; a round takes as long as on the slowest rank.
"""

import argparse
import itertools
import os
import sys
import time
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_paral.comm import ALL_REDUCE, count_traffic
from lightning_paral.comm.reduce_scatter import direct_reduce_scatter
from lightning_paral.comm.reduction import WIRE_DTYPES
from lightning_paral.compat.torch.process_groups import all_gather_single, reduce_scatter_single
from lightning_paral.text import parse_bytes
from tests.benchmarks.common import show
from tests.network import run_on_nodes

RATE = "1gbit"
"""The bandwidth of the link of each node, as tc writes it."""
OTHERS = ("reduce_scatter_direct", "reduce_scatter_native", "all_gather", "broadcast")
ROUNDS = 10


def run(algorithm: str, wire: str, tensor: Tensor) -> None:
    """Run a collective on an fp32 tensor. *Collective*."""
    group: Any = dist.group.WORLD
    part = tensor.chunk(dist.get_world_size())[dist.get_rank()]
    if algorithm in ALL_REDUCE:
        ALL_REDUCE[algorithm](tensor, group, wire_dtype=WIRE_DTYPES.get(wire))
    elif algorithm == "broadcast":
        dist.broadcast(tensor, src=0)
    elif algorithm == "all_gather":
        all_gather_single(tensor, part.clone())
    elif algorithm == "reduce_scatter_direct":
        direct_reduce_scatter(torch.empty_like(part), tensor, group)
    else:
        reduce_scatter_single(torch.empty_like(part), tensor)


def of_ranks(value: Any) -> list[Any]:
    """Return the value of each rank. *Collective*."""
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def measure(algorithms: list[str], wires: list[str], size: int) -> list[dict[str, Any]]:
    """Return a row for each algorithm and dtype. *Collective*."""
    source = torch.randn(size // 4 // dist.get_world_size() * dist.get_world_size())
    cases = [case for case in itertools.product(algorithms, wires) if case[1] == "fp32" or case[0] in ALL_REDUCE]
    times: dict[tuple[str, str], list[float]] = {case: [] for case in cases}
    sent = {}
    for number in range(ROUNDS + 1):
        for case in cases:
            tensor = source.clone()
            dist.barrier()
            with count_traffic() as traffic:
                began = time.perf_counter()
                run(*case, tensor)
                seconds = time.perf_counter() - began
                dist.barrier()
            if number:
                times[case].append(max(of_ranks(seconds)))
            else:  # warms up
                sent[case] = of_ranks(traffic.payload_bytes if traffic.socket_bytes is None else traffic.socket_bytes)
    return [
        {"algorithm": case[0], "wire": case[1], "size_bytes": source.nbytes, "seconds": median(times[case])}
        | {"sent_bytes": sent[case]}
        for case in cases
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int)
    parser.add_argument("--sizes", default="4MiB,25MiB")
    parser.add_argument("--algorithms", default=",".join((*ALL_REDUCE, *OTHERS)))
    parser.add_argument("--wire", default=",".join(("fp32", "bf16")))
    options = parser.parse_args()
    if options.nodes and "RANK" not in os.environ:
        command = [sys.executable, "-m", "tests.benchmarks.all_reduce", *sys.argv[1:]]
        ended = run_on_nodes(options.nodes, command, RATE, timeout=1800)
        print(ended[0].printed, end="")
        sys.exit(max(end.code for end in ended))
    dist.init_process_group("gloo")
    rows = []
    for size in options.sizes.split(","):
        rows += measure(options.algorithms.split(","), options.wire.split(","), parse_bytes(size, "--sizes"))
    show(rows)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
