"""What each rank of `paral bench memory` runs: a few steps, in which it measures its peak of memory."""

import time
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_paral.diagnostics.bench.devices import device_and_backend
from lightning_paral.diagnostics.bench.rank import Rank
from lightning_paral.diagnostics.bench.raw_loop import RAW, run_raw_loop
from lightning_paral.diagnostics.bench.resident import PeakMemory
from lightning_paral.diagnostics.bench.task import import_classes, make_task

NUM_STEPS = 3
"""The first step creates optimizer states; the gradients of a step may exist until the next one computes its own."""


def run_and_measure(rank: Rank, *, strategy: str, config: str | None, overrides: Sequence[str]) -> dict[str, Any]:
    """Train `NUM_STEPS` steps under one strategy. *Collective* over all ranks.

    Args:
        rank: this rank, in a new process.
        strategy: the name of a strategy or of a loop.
        config: as in `make_task`.
        overrides: as in `make_task`.

    Returns:
        dict: `peak_bytes` and `start_bytes`, the peaks until the end and until the first step begins, without what
            imports take; `start_seconds`, the time from `fit()`, or the begin of the loop, to the first step.
    """
    device, _ = device_and_backend()
    import_classes(config, overrides)
    _load_libraries(uses_deepspeed="zero" in strategy or strategy.startswith("deepspeed"))
    meter = _Meter(PeakMemory(device))
    task = make_task(config, overrides)
    if strategy in RAW:
        meter.begin_fit()
        run_raw_loop(
            rank, strategy, task, device, meter.after_step, before_first=meter.begin_steps, builds_sharded=True
        )
    else:
        trainer = task.make_trainer(strategy, device, rank.world_size, _MeterSteps(meter), max_steps=NUM_STEPS)
        meter.begin_fit()
        trainer.fit(task.module, datamodule=task.data)
    return meter.measured | {"device": device.type}


def _load_libraries(*, uses_deepspeed: bool) -> None:
    """Import what a fit imports late, and take a step of a tiny module: code takes memory when it first runs."""
    if uses_deepspeed:
        import_module("deepspeed")
        torch.compile(torch.nn.Identity())  # imports TorchInductor, as DeepSpeed's decorators do in a fit
    layer = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(layer.parameters())
    layer(torch.ones(8, 8)).sum().backward()
    optimizer.step()


class _Meter:
    """Reads the peaks and the time at the moments that matter."""

    def __init__(self, memory: PeakMemory) -> None:
        self._memory = memory
        self._num_steps = 0
        self.measured: dict[str, Any] = {}

    def begin_fit(self) -> None:
        self._began = time.perf_counter()

    def begin_steps(self) -> None:
        self.measured["start_seconds"] = time.perf_counter() - self._began
        self.measured["start_bytes"] = self._memory.so_far()

    def after_step(self, batch: Any) -> bool:
        """Note the peak at the end of a step. Return whether to go on."""
        self._num_steps += 1
        self.measured["peak_bytes"] = self._memory.so_far()
        return self._num_steps < NUM_STEPS


class _MeterSteps(Callback):
    """Calls the meter when the first step begins, and when a step has ended."""

    def __init__(self, meter: _Meter) -> None:
        self._meter = meter

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            self._meter.begin_steps()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._meter.after_step(batch)
