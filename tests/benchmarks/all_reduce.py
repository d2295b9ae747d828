"""`paral bench comm` between nodes that are joined by links of a known bandwidth (needs root, for network namespaces).

    python -m tests.benchmarks.all_reduce --nodes 4 --sizes 4MiB,25MiB

Each node has one rank. All options but `--nodes` and `--rate` are those of `paral bench comm`.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

from tests.network import joined_nodes

ROOT = Path(__file__).parents[2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--rate", default="1gbit", help="bandwidth of the link of each node, as tc writes it")
    options, rest = parser.parse_known_args()
    with joined_nodes(options.nodes, options.rate) as nodes:
        launched = {"WORLD_SIZE": str(options.nodes), "MASTER_ADDR": nodes.addresses[0], "MASTER_PORT": "29544"}
        launched |= {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
        ranks = [
            subprocess.Popen(
                nodes.command_on(rank, [sys.executable, "-m", "lightning_paral", "bench", "comm", *rest]),
                cwd=ROOT,
                env=os.environ | launched | {"RANK": str(rank)},
                stdout=None if rank == 0 else subprocess.DEVNULL,
            )
            for rank in range(options.nodes)
        ]
        sys.exit(max(process.wait(timeout=1800) for process in ranks))


if __name__ == "__main__":
    main()
