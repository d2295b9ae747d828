"""A training step of the example's GPT under `paral_dp` against the same step, of the same samples, under `paral_ddp`.

    python -m tests.benchmarks.dp_step

Blocks of steps of each kind alternate: `paral_dp` on two CPU devices in this process, `paral_ddp` on two ranks, and one
device without either. A step lasts from the end of one to the end of the next.
"""

import statistics

import torch
from torch.utils.data import DataLoader

import lightning_paral  # noqa: F401  registers the names
from examples.gpt import GPT, StandardLibrary
from tests.benchmarks.common import StepTimes, differences, silent_ranks
from tests.running import quiet_trainer

GLOBAL_BATCH_SIZE, CONTEXT, NUM_DEVICES = 32, 128, 2
NUM_BLOCKS, NUM_STEPS = 6, 10


def steps(strategy: str, num_devices: int, batch_size: int) -> list[float]:
    """Return the seconds of steps; the first one warms up."""
    times = StepTimes()
    trainer = quiet_trainer(
        strategy=strategy, devices=num_devices, max_steps=NUM_STEPS, gradient_clip_val=1.0, callbacks=[times]
    )
    loader = DataLoader(StandardLibrary("train", CONTEXT), batch_size=batch_size, shuffle=True, drop_last=True)
    trainer.fit(GPT(), loader)
    return differences(times.ends, 1)


def main() -> None:
    torch.set_num_threads(NUM_DEVICES)
    seconds: dict[str, list[float]] = {"one device": [], "paral_dp": [], "paral_ddp": []}
    with silent_ranks() as on_ranks:
        for _ in range(NUM_BLOCKS):
            seconds["one device"] += steps("auto", 1, GLOBAL_BATCH_SIZE)
            seconds["paral_dp"] += steps("paral_dp", NUM_DEVICES, GLOBAL_BATCH_SIZE)
            share = GLOBAL_BATCH_SIZE // NUM_DEVICES
            seconds["paral_ddp"] += on_ranks(NUM_DEVICES, steps, "paral_ddp", NUM_DEVICES, share)[0]
    reference = statistics.median(seconds["paral_ddp"])
    print(f"{GLOBAL_BATCH_SIZE} samples a step, {NUM_DEVICES} threads an operation:")
    for kind, of_kind in seconds.items():
        median = statistics.median(of_kind)
        print(
            f"{kind}: {median * 1e3:.1f} ms, {median / reference:.2f} times paral_ddp "
            f"(median of {len(of_kind)} steps; the fastest took {min(of_kind) * 1e3:.1f} ms)"
        )


if __name__ == "__main__":
    main()
