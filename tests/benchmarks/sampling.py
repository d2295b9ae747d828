"""What it costs a rank to draw its batches, against drawing all of them with torch's own samplers in one process.

`python -m tests.benchmarks.sampling`
"""

import argparse
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable

from torch.utils.data import BatchSampler, RandomSampler

from lightning_paral.data.order import Order, Seed
from lightning_paral.data.sampler import RankBatchSampler, Share


def seconds(make: Callable[[], Iterable[list[int]]]) -> float:
    start = time.perf_counter()
    deque(make(), maxlen=0)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--length", type=int, default=10_000_000)
    parser.add_argument("--world-size", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    for batch_size in (32, 256):
        batches = BatchSampler(RandomSampler(range(options.length)), batch_size, drop_last=False)

        def ours(split: str, batches: BatchSampler = batches) -> RankBatchSampler:
            share = Share(rank=1, world_size=options.world_size, split=split, ending="wrap")
            return RankBatchSampler(Order(batches, Seed(0)), share)

        ways = {
            "plain": lambda batches=batches: batches,
            "split='batch'": lambda ours=ours: ours("batch"),
            "split='global'": lambda ours=ours: ours("global"),
        }
        taken = {name: [] for name in ways}
        for _ in range(options.rounds):  # interleaved: other load falls on all of them
            for name, make in ways.items():
                taken[name].append(seconds(make))
        plain = statistics.median(taken["plain"])
        for name, times in taken.items():
            median = statistics.median(times)
            print(
                f"{options.length:,} indices, batches of {batch_size}, rank 1 of {options.world_size}, {name:15}"
                f"{median:7.2f} s  {median / plain:5.2f} x plain"
            )


if __name__ == "__main__":
    main()
