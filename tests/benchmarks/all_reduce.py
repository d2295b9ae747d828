"""`paral bench comm` between nodes that are joined by links of a known bandwidth (needs root, for network namespaces).

    python -m tests.benchmarks.all_reduce --nodes 4 --sizes 4MiB,25MiB

Each node has one rank. All options but `--nodes` are those of `paral bench comm`.
"""

import argparse
import sys

from tests.network import run_on_nodes

RATE = "1gbit"
"""The bandwidth of the link of each node, as tc writes it."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=2)
    options, rest = parser.parse_known_args()
    command = [sys.executable, "-m", "lightning_paral", "bench", "comm", *rest]
    ended = run_on_nodes(options.nodes, command, RATE, timeout=1800)
    print(ended[0].printed, end="")
    sys.exit(max(end.code for end in ended))


if __name__ == "__main__":
    main()
