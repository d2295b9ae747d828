"""Forked processes, such as loader workers, run with any process groups that they inherit."""

import gc
import multiprocessing
from typing import Any

import torch.distributed as dist

from tests.models.regression import fit_regression


def collect_in_a_fork() -> int | None:
    """Fork a process that garbage-collects a destroyed process group; return its exit code, `None` if it hangs."""
    fit_regression(2, 1, 2, strategy="paral_ddp")
    gc.disable()  # the group must still be uncollected garbage at the fork
    try:
        group: Any = dist.new_group()
        cycle: list[Any] = [group]
        cycle.append(cycle)
        dist.destroy_process_group(group)
        del group, cycle
        process = multiprocessing.get_context("fork").Process(target=gc.collect)
        process.start()
        process.join(timeout=60)
        if process.exitcode is None:
            process.kill()
            process.join()
            return None
        return process.exitcode
    finally:
        gc.enable()


def test_forked_process_does_not_abort_an_uncollected_process_group(on_ranks) -> None:
    assert on_ranks(2, collect_in_a_fork) == [0, 0]
