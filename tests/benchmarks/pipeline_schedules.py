"""Waiting and kept activations of the schedules of a pipeline, with eight micro-batches.

    python -m tests.benchmarks.pipeline_schedules

Waits: blocks sleep instead of computing, twice as long in the backward pass, so that more ranks than cores run side by
side. The rest of a step, in which a rank does not sleep, is what it waits, and what sending takes. Activations: the
most bytes of tensors that autograd keeps at once for the backward pass, in a step of the example's GPT.
"""

import time
import weakref
from statistics import median
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from examples.gpt import GPT, StandardLibraryData
from lightning_paral import ParalPipelineStrategy
from lightning_paral.engines.pipeline.parameters import is_elsewhere
from lightning_paral.engines.pipeline.schedule import idle_fraction
from tests.benchmarks.common import print_table, silent_ranks
from tests.running import quiet_trainer

SCHEDULES = ("gpipe", "1f1b", "interleaved")
NUM_BLOCKS, NUM_MICRO_BATCHES, NUM_STEPS = 8, 8, 8
SECONDS = 0.004
"""Of the forward pass of a block."""


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        time.sleep(SECONDS)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        time.sleep(2 * SECONDS)
        return gradient


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = _Sleep.apply(self.layer(x))  # type: ignore[no-untyped-call]
        return output


class Sleeps(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(NUM_BLOCKS)))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.blocks(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Times(Callback):
    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self.began = time.perf_counter()

    def on_before_optimizer_step(self, *_: Any) -> None:
        self.seconds.append(time.perf_counter() - self.began)


class SavedBytes(Callback):
    """Counts the bytes of storages that autograd keeps in the last step, but for those of parameters."""

    def __init__(self) -> None:
        self.peak = self.now = 0
        self._kept: dict[int, int] = {}

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == NUM_STEPS - 1:
            self._of_parameters = {
                each.untyped_storage()._cdata for each in pl_module.parameters() if not is_elsewhere(each)
            }
            self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda kept: kept.tensor)
            self._hooks.__enter__()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == NUM_STEPS - 1:
            self._hooks.__exit__()

    def _pack(self, tensor: Tensor) -> Any:
        storage, kept = tensor.untyped_storage(), _Kept(tensor)
        key, num_bytes = storage._cdata, storage.nbytes()
        if key not in self._of_parameters:
            self._count(key, num_bytes, 1)
            weakref.finalize(kept, self._count, key, num_bytes, -1)
        return kept

    def _count(self, key: int, num_bytes: int, change: int) -> None:
        before = self._kept.get(key, 0)
        self._kept[key] = before + change
        self.now += num_bytes * ((self._kept[key] > 0) - (before > 0))
        self.peak = max(self.peak, self.now)


class _Kept:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def idle(schedule: Any, num_ranks: int) -> float:
    """Return the part of a step in which this rank does not sleep. *Collective*."""
    times = Times()
    torch.manual_seed(1)
    _fit(Sleeps(), DataLoader(torch.randn(8 * NUM_STEPS, 8), 8), schedule, num_ranks, times)
    busy = NUM_MICRO_BATCHES * NUM_BLOCKS / num_ranks * 3 * SECONDS
    return 1 - busy / median(times.seconds[-3:])


def saved(schedule: Any, num_ranks: int) -> int:
    """Return the peak of the bytes that autograd keeps on this rank. *Collective*."""
    counted = SavedBytes()
    torch.manual_seed(1)
    _fit(GPT(num_layers=NUM_BLOCKS), StandardLibraryData(), schedule, num_ranks, counted)
    return counted.peak


def _fit(module: Any, data: Any, schedule: Any, num_ranks: int, callback: Callback) -> None:
    strategy = ParalPipelineStrategy(schedule=schedule, micro_batches=NUM_MICRO_BATCHES)
    options: dict[str, Any] = {"max_steps": NUM_STEPS, "limit_val_batches": 0, "callbacks": [callback]}
    quiet_trainer(strategy=strategy, devices=num_ranks, **options).fit(module, data)


def main() -> None:
    rows = []
    with silent_ranks() as on_ranks:
        for num_ranks in (2, 4):
            for schedule in SCHEDULES:
                expected = idle_fraction(num_ranks, NUM_MICRO_BATCHES, 2 if schedule == "interleaved" else 1)
                waits = on_ranks(num_ranks, idle, schedule, num_ranks)
                kept = reversed(on_ranks(num_ranks, saved, schedule, num_ranks))  # the first ranks are the last stage
                in_mb = ", ".join(f"{each / 1e6:.1f}" for each in kept)
                rows.append([num_ranks, schedule, expected, sum(waits) / num_ranks, in_mb])
    print_table(
        ("stages", "schedule", "idle, expected", "idle", "MB kept, by stage"), rows, ("g", "", ".3f", ".3f", "")
    )


if __name__ == "__main__":
    main()
