"""Times of training steps under strategies, beside hand-written loops on the same engine.

    torchrun --nproc-per-node 2 -m tests.benchmarks.steps paral_ddp paral_zero2
    torchrun --nproc-per-node 1 -m tests.benchmarks.steps --device cuda --size 124M

Strategies and loops take turns in rounds, so that other load falls on all of them. Times are medians over all ranks.
"""

import argparse
import os
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from tests.benchmarks.common import show, silence
from tests.benchmarks.loops import EXAMPLE, ON_ONE_DEVICE, counterpart, join, measure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=ON_ONE_DEVICE, help="strategies; by default all for one device")
    parser.add_argument("--loop", help="the loop to compare with, by default one on the same engine")
    parser.add_argument("--size", choices=(EXAMPLE, "124M"), default=EXAMPLE)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    silence()
    device = torch.device("cpu" if options.device == "cpu" else f"cuda:{os.environ['LOCAL_RANK']}")
    join(device)
    loops = {name: options.loop or counterpart(name, options.size) for name in options.names}
    seconds: dict[str, list[float]] = {name: [] for name in (*options.names, *loops.values())}
    peaks = dict.fromkeys(seconds, 0)
    for _ in range(options.rounds):
        for name in seconds:
            block, peak = measure(name, options.size, device, options.steps)
            found: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(found, block)
            seconds[name] += [taken for rank in found for taken in rank]
            peaks[name] = max(peaks[name], peak)
    rows = []
    for name, taken in seconds.items():
        ratio = median(taken) / median(seconds[loops[name]]) if name in loops else None
        rows.append({"name": name, "seconds": median(taken), "ratio": ratio, "peak_bytes": peaks[name] or None})
    show(rows)


if __name__ == "__main__":
    main()
