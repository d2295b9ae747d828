"""A training step of the example's GPT under `paral_dp` against the same step, of the same samples, under `paral_ddp`.

    python -m tests.benchmarks.dp_step

Blocks of steps of each kind alternate: `paral_dp` on two CPU devices in this process, `paral_ddp` on two ranks, and one
device without either. A step lasts from the end of one to the end of the next.
"""

import argparse
import statistics
import time
from itertools import pairwise

import torch
from lightning.pytorch import Callback
from torch.utils.data import DataLoader

import lightning_paral  # noqa: F401  registers the names
from examples.gpt import GPT, StandardLibrary
from tests.rank_pool import RankPool
from tests.running import quiet_trainer

GLOBAL_BATCH_SIZE, CONTEXT, NUM_DEVICES = 32, 128, 2


class StepTimes(Callback):
    """Records when each training step ends."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_train_batch_end(self, *_: object) -> None:
        self.ends.append(time.perf_counter())


def steps(strategy: str, num_devices: int, batch_size: int, num_steps: int) -> list[float]:
    times = StepTimes()
    trainer = quiet_trainer(
        strategy=strategy, devices=num_devices, max_steps=num_steps, gradient_clip_val=1.0, callbacks=[times]
    )
    loader = DataLoader(StandardLibrary("train", CONTEXT), batch_size=batch_size, shuffle=True, drop_last=True)
    trainer.fit(GPT(), loader)
    return [end - start for start, end in pairwise(times.ends[1:])]  # the first step warms up


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--threads", type=int, default=NUM_DEVICES, help="of each operation, outside of the ranks")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    pool = RankPool()
    seconds: dict[str, list[float]] = {"one device": [], "paral_dp": [], "paral_ddp": []}
    try:
        for _ in range(arguments.blocks):
            seconds["one device"] += steps("auto", 1, GLOBAL_BATCH_SIZE, arguments.steps)
            seconds["paral_dp"] += steps("paral_dp", NUM_DEVICES, GLOBAL_BATCH_SIZE, arguments.steps)
            share = GLOBAL_BATCH_SIZE // NUM_DEVICES
            seconds["paral_ddp"] += pool.run(
                NUM_DEVICES, steps, "paral_ddp", NUM_DEVICES, share, arguments.steps, timeout=600.0
            )[0]
    finally:
        pool.close()
    reference = statistics.median(seconds["paral_ddp"])
    print(f"{GLOBAL_BATCH_SIZE} samples a step, {arguments.threads} threads an operation:")
    for kind, of_kind in seconds.items():
        median = statistics.median(of_kind)
        print(
            f"{kind}: {median * 1e3:.1f} ms, {median / reference:.2f} times paral_ddp "
            f"(median of {len(of_kind)} steps; the fastest took {min(of_kind) * 1e3:.1f} ms)"
        )


if __name__ == "__main__":
    main()
