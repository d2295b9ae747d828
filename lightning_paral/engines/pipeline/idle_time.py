"""Measure for how long the stages of a pipeline wait for each other, and say so once."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_info

from lightning_paral.distributed.exchange import gather_objects
from lightning_paral.engines.pipeline.groups import PipelineGroups
from lightning_paral.engines.pipeline.schedule import idle_fraction

_NUM_STEPS = 5


class IdleTime:
    """Measures the first training steps but one, in which libraries still allocate memory and choose kernels.

    Args:
        num_stages: the number of stages.
        device: the device of this rank. On CUDA, waits are measured on the current stream, without stopping the host.
    """

    def __init__(self, num_stages: int, device: torch.device) -> None:
        self._num_stages = num_stages
        self._on_cuda = device.type == "cuda"
        self._num_steps = 0
        self._micro_batches: set[int] = set()
        self._is_in_step = False
        self._steps: list[tuple[Any, Any]] = []
        self._waits: list[tuple[Any, Any]] = []

    @contextmanager
    def step(self, num_micro_batches: int, groups: PipelineGroups | None) -> Iterator[None]:
        """Measure a training step; after the last one that is measured, print the result. *Collective* then."""
        if groups is None or self._num_steps > _NUM_STEPS:
            yield
            return
        self._is_in_step = self._num_steps > 0
        start = self._now()
        yield
        if self._is_in_step:
            self._steps.append((start, self._now()))
            self._micro_batches.add(num_micro_batches)
        self._is_in_step = False
        self._num_steps += 1
        if self._num_steps > _NUM_STEPS:
            self._report(groups)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time inside the block as idle."""
        if not self._is_in_step:
            yield
            return
        start = self._now()
        yield
        self._waits.append((start, self._now()))

    def _now(self) -> Any:
        if not self._on_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _seconds(self, intervals: list[tuple[Any, Any]]) -> float:
        if not self._on_cuda:
            return float(sum(end - start for start, end in intervals))
        return float(sum(start.elapsed_time(end) for start, end in intervals)) / 1000

    def _report(self, groups: PipelineGroups) -> None:
        if self._on_cuda:
            torch.cuda.current_stream().synchronize()
        waited, total = self._seconds(self._waits), self._seconds(self._steps)
        self._steps, self._waits = [], []
        stages = gather_objects((waited, total), groups.values)
        measured = sum(waited for waited, _ in stages) / max(sum(total for _, total in stages), 1e-9)
        rank_zero_info(idle_message(measured, self._num_stages, max(self._micro_batches)))


def idle_message(measured: float, num_stages: int, num_micro_batches: int) -> str:
    """Return what is printed.

    Args:
        measured: the part of the time in which stages waited, on average.
        num_stages: the number of stages.
        num_micro_batches: the number of micro-batches of a step.
    """
    expected = idle_fraction(num_stages, num_micro_batches)
    parts = "micro-batch" if num_micro_batches == 1 else "micro-batches"
    more = 2 * num_micro_batches + num_stages - 1  # halves `expected`
    return (
        f"Pipeline: the stages waited for {measured:.0%} of training steps 2 to {_NUM_STEPS + 1}. With {num_stages} "
        f"equally fast stages and {num_micro_batches} {parts}, {expected:.0%} are expected; {more} micro-batches "
        "would halve this."
    )
