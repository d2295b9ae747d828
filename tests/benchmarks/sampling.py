"""Measure what it costs a rank to draw its batches, compared with torch's own samplers in one process.

    python -m tests.benchmarks.sampling

Times are CPU times of the thread, per step of all ranks, after the first batch and before the end of the epoch. They
exclude building and shuffling the list of indices, which all samplers do.
"""

import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable
from itertools import islice

from torch.utils.data import BatchSampler, RandomSampler

from lightning_paral.data.global_order import GlobalOrder, Seed
from lightning_paral.data.sampler import RankBatchSampler, ShardSpec

LENGTH, WORLD_SIZE, NUM_ROUNDS = 10_000_000, 8, 5


def seconds(batches: Iterable[list[int]], count: int) -> float:
    """Draw one batch, then `count` batches; return the time for these."""
    drawn = iter(batches)
    next(drawn)
    start = time.thread_time()
    deque(islice(drawn, count), maxlen=0)
    return time.thread_time() - start


def main() -> None:
    for batch_size in (32, 256):
        indices = RandomSampler(range(LENGTH))
        batches = BatchSampler(indices, batch_size, drop_last=False)
        large = BatchSampler(indices, batch_size * WORLD_SIZE, drop_last=False)

        def ours(split: str, batches: BatchSampler = batches) -> RankBatchSampler:
            shard = ShardSpec(data_rank=1, data_size=WORLD_SIZE, split=split, remainder="wrap")
            return RankBatchSampler(GlobalOrder(batches, Seed(0)), shard)

        num_steps = LENGTH // (batch_size * WORLD_SIZE) // 2
        ways: dict[str, tuple[Callable[[], Iterable[list[int]]], int]] = {
            "all, by torch": (lambda batches=batches: batches, num_steps * WORLD_SIZE),
            "split='batch'": (lambda ours=ours: ours("batch"), num_steps),
            "split='global'": (lambda ours=ours, large=large: ours("global", large), num_steps),
        }
        taken: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(NUM_ROUNDS):  # interleaved: other load falls on all of them
            for name, (make, count) in ways.items():
                taken[name].append(seconds(make(), count) / num_steps * 1e6)
        for name, times in taken.items():
            print(
                f"{LENGTH:,} indices, batches of {batch_size}, rank 1 of {WORLD_SIZE}, {name:15}"
                f"{statistics.median(times):9.1f} us per step"
            )


if __name__ == "__main__":
    main()
