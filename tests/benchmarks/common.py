"""What benchmarks share: silence, ranks, the times of steps, and the table that they print."""

import logging
import os
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from tabulate import tabulate

from tests.rank_pool import RankPool

NUM_STEPS, NUM_ROUNDS, NUM_SKIPPED = 12, 5, 4

Loop = Callable[[], tuple[list[float], float]]
"""Runs `NUM_STEPS` steps; returns the seconds of those after the first `NUM_SKIPPED`, and the last loss."""
OnRanks = Callable[..., list[Any]]
"""A function, called as `on_ranks(num_ranks, function, *arguments)`, that returns the result of each rank."""


def silence() -> None:
    """Show no warnings, and none of Lightning's messages."""
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


@contextmanager
def silent_ranks() -> Iterator[OnRanks]:
    """Provide processes that run functions as ranks, and silence in them and here."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    silence()
    pool = RankPool()
    try:
        yield lambda num_ranks, *call: pool.run(num_ranks, _silently, *call, timeout=900.0)
    finally:
        pool.close()


def _silently(function: Callable[..., Any], *arguments: Any) -> Any:
    silence()
    return function(*arguments)


class StepTimes(Callback):
    """Records when each training step begins and ends, and the losses."""

    def __init__(self) -> None:
        self.starts: list[float] = []
        self.ends: list[float] = []
        self.losses: list[float] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self.starts.append(time.perf_counter())

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any) -> None:
        self.ends.append(time.perf_counter())
        self.losses.append(float(outputs["loss"]))


def differences(times: Sequence[float], num_skipped: int) -> list[float]:
    """Return the seconds between neighbors, without the first ones."""
    return [later - earlier for earlier, later in pairwise(times)][num_skipped:]


def print_table(headers: Sequence[str], rows: Sequence[Sequence[Any]], floatfmt: str | Sequence[str]) -> None:
    """Print a table."""
    print(tabulate(rows, headers=headers, floatfmt=floatfmt))


def compare(loops: Mapping[str, Loop], ours: str) -> None:
    """Print the median time of a step of each loop on two ranks, in turns, relative to the first one.

    Args:
        loops: functions that can be pickled, by name.
        ours: the name of one that trains with a strategy.
    """
    with silent_ranks() as on_ranks:
        found = on_ranks(2, _rounds, loops, ours)[0]
    times = {name: [each for other, steps, _ in found if other == name for each in steps] for name in loops}
    losses = {name: loss for name, _, loss in found}
    medians = {name: statistics.median(each) for name, each in times.items()}
    first = next(iter(medians.values()))
    rows = [(name, 1000 * median, median / first, losses[name]) for name, median in medians.items()]
    print_table(("", "step, ms", "ratio", "last loss"), rows, ("", ".0f", ".2f", ".6f"))


def _rounds(loops: Mapping[str, Loop], ours: str) -> list[tuple[str, list[float], float]]:
    loops[ours]()  # creates the process group
    found = []
    for _ in range(NUM_ROUNDS):
        for name, loop in loops.items():
            dist.barrier()
            found.append((name, *loop()))
    return found


def times_and_loss(starts: Sequence[float], loss: float) -> tuple[list[float], float]:
    """Return the result of a `Loop`."""
    return differences(starts, NUM_SKIPPED), loss


def bytes_of(tensors: Any) -> int:
    """Return the bytes of the storages behind `tensors`, each once."""
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in tensors
        if isinstance(tensor, torch.Tensor)
    }
    return sum(storages.values())
