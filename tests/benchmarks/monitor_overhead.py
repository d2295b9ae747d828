"""What `ParalMonitor` adds to a training step, in processor time, and its part of a step of the example's GPT.

    python -m tests.benchmarks.monitor_overhead                                            # one process
    torchrun --nproc-per-node 2 -m tests.benchmarks.monitor_overhead --strategy paral_ddp  # rank 0 reads the reports

The callback costs the same whatever the model is. Its cost is measured with a very small GPT, whose steps vary by less,
and compared with a step of the example's GPT. Within one fit, blocks of 22 steps with and without the callback
alternate. What is shown is the median, over neighboring blocks, of the difference of their median steps. Steps that
report are left out of these, and are compared with the other steps of their block.
"""

import argparse
import os
import statistics
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader

from examples.gpt import GPT, StandardLibrary
from lightning_paral import ParalMonitor
from tests.running import quiet_trainer

BATCH_SIZE, CONTEXT, SMALL_CONTEXT = 32, 128, 16
BLOCK, REPORT_EVERY = 22, 10


class Blocks(Callback):
    """Records the processor time of each step, and adds or removes a callback after every `BLOCK` steps."""

    def __init__(self, callback: Callback | None = None) -> None:
        self.callback = callback
        self.is_measured = False
        self.ends: list[float] = []
        self.blocks: list[tuple[bool, list[float]]] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: object) -> None:
        self.ends.append(time.process_time())
        if len(self.ends) <= BLOCK:
            return
        self.blocks.append((self.is_measured, [end - start for start, end in pairwise(self.ends)]))
        if self.callback is not None:
            self.is_measured = not self.is_measured
            if self.is_measured:
                self.callback.on_train_start(trainer, pl_module)
                trainer.callbacks = [self.callback, *trainer.callbacks]
            else:
                self.callback.teardown(trainer, pl_module, "fit")
                trainer.callbacks = [each for each in trainer.callbacks if each is not self.callback]
        self.ends = [time.process_time()]


def fit(module: GPT, loader: Any, blocks: Blocks, num_steps: int, strategy: str) -> None:
    trainer = quiet_trainer(
        strategy=strategy,
        devices=dist.get_world_size() if dist.is_initialized() else 1,
        max_steps=num_steps,
        gradient_clip_val=1.0,
        callbacks=[blocks],
        logger=CSVLogger("build/monitor_overhead", version=f"{os.getpid()}"),
        log_every_n_steps=10**9,
    )
    trainer.fit(module, loader)


def median(seconds: Sequence[float]) -> float:
    return statistics.median(seconds) if seconds else float("nan")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", default="auto")
    parser.add_argument("--blocks", type=int, default=80)
    parser.add_argument("--every", type=int, default=50, help="steps between two reports, for the sum")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    small = DataLoader(StandardLibrary("train", SMALL_CONTEXT), 2, shuffle=True, drop_last=True)
    large = DataLoader(StandardLibrary("train", CONTEXT), BATCH_SIZE, shuffle=True, drop_last=True)
    monitor = ParalMonitor(every_n_steps=REPORT_EVERY, tokens_per_sample=CONTEXT, print_summary=False)
    blocks, whole = Blocks(monitor), Blocks()
    module = GPT(width=16, num_layers=1, num_heads=2, context=SMALL_CONTEXT)
    fit(module, small, blocks, (BLOCK + 1) * options.blocks + 1, options.strategy)
    fit(GPT(), large, whole, BLOCK + 2, options.strategy)

    reports = range(REPORT_EVERY - 1, BLOCK, REPORT_EVERY)
    steps, costs = [], []
    for is_measured, seconds in blocks.blocks[1:]:  # the first one warms up
        steps.append((is_measured, median([each for index, each in enumerate(seconds[1:], 1) if index not in reports])))
        if is_measured:
            costs += [seconds[index] - steps[-1][1] for index in reports]
    each = median([(b - a) if with_b else (a - b) for (_, a), (with_b, b) in pairwise(steps)])
    base, added = median([step for is_measured, step in steps if not is_measured]), each + median(costs) / options.every
    step = median(whole.blocks[0][1])
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(
            f"{options.strategy}: {added * 1e6:.0f} µs a step: {each * 1e6:.0f} in each, and {median(costs) * 1e6:.0f} "
            f"in one of {options.every} ({len(steps)} blocks of {BLOCK} steps of {base * 1e3:.2f} ms).\n"
            f"A step of the example's GPT takes {step * 1e3:.1f} ms: {added / step:.2%}."
        )
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
