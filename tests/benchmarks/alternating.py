"""Run two or more training loops in turns on ranks, and print a table of the times of their steps."""

import logging
import os
import statistics
import time
import warnings
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import torch.distributed as dist
from lightning.pytorch import Callback
from tabulate import tabulate

from tests.rank_pool import RankPool

NUM_STEPS, NUM_ROUNDS, NUM_SKIPPED = 12, 5, 4

Loop = Callable[[], tuple[list[float], float]]
"""Runs `NUM_STEPS` steps; returns the seconds of those after the first `NUM_SKIPPED`, and the last loss."""


class Times(Callback):
    """Records when each training step begins, and the losses."""

    def __init__(self) -> None:
        self.starts: list[float] = []
        self.losses: list[float] = []

    def on_train_batch_start(self, *args: Any) -> None:
        self.starts.append(time.perf_counter())

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *args: Any) -> None:
        self.losses.append(float(outputs["loss"]))

    def result(self) -> tuple[list[float], float]:
        return differences(self.starts), self.losses[-1]


def differences(starts: list[float]) -> list[float]:
    return [later - earlier for earlier, later in pairwise(starts)][NUM_SKIPPED:]


def rounds(loops: Mapping[str, Loop], ours: str) -> list[tuple[str, list[float], float]]:
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    loops[ours]()  # creates the process group
    found = []
    for _ in range(NUM_ROUNDS):
        for name, loop in loops.items():
            dist.barrier()
            found.append((name, *loop()))
    return found


def print_table(loops: Mapping[str, Loop], ours: str) -> None:
    """Print the median time of a step of each loop on two ranks, relative to the first one.

    Args:
        loops: functions that can be pickled, by name.
        ours: the name of one that trains with a strategy.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    pool = RankPool()
    found = pool.run(2, rounds, loops, ours, timeout=900)[0]
    pool.close()
    times = {name: [each for other, steps, _ in found if other == name for each in steps] for name in loops}
    losses = {name: loss for name, _, loss in found}
    first = statistics.median(times[next(iter(loops))])
    rows = [
        (name, 1000 * statistics.median(each), statistics.median(each) / first, losses[name])
        for name, each in times.items()
    ]
    print(tabulate(rows, headers=("", "step, ms", "ratio", "last loss"), floatfmt=("", ".0f", ".2f", ".6f")))
