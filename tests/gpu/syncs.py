"""Count how often the host waits for the GPU in a training step, compared with a hand-written loop.

On CUDA, `torch.cuda.set_sync_debug_mode("warn")` reports every wait that torch knows of, with the stack; the profiler
counts calls of the CUDA runtime, including those of NCCL and DeepSpeed's extensions. On CPU only reads of single values
are counted, `aten::_local_scalar_dense`, each of which would be a wait on CUDA.
"""

import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader, IterableDataset

from tests.gpu.place import Facts, options_of, synchronize
from tests.running import quiet_trainer

FIRST, NUM_STEPS = 4, 8
"""Number of steps before the window, and in it."""
_WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")
_READS = ("aten::_local_scalar_dense",)
_OWNERS = ("lightning_paral", "deepspeed", "lightning", "tests")
_FREE_OF_WAITS = ("paral_ddp", "paral_ddp_ring", "paral_fsdp")
"""Strategies in whose steps our code must not wait."""


class OnDevice(IterableDataset[Tensor]):
    """Batches that are already on the device, so that moving them causes no wait."""

    def __init__(self, device: str) -> None:
        self.batches = torch.randn(FIRST + NUM_STEPS + 2, 16, 8).to(device)

    def __iter__(self) -> Iterator[Tensor]:
        yield from self.batches


class Plain(LightningModule):
    """Reads no value back from the device itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 8))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return nn.functional.mse_loss(self.layers(batch), batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Window(Callback):
    """Counts waits in a window of steps."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.calls: Counter[str] = Counter()
        self.by_owner: Counter[str] = Counter()
        self.places: Counter[str] = Counter()
        self._undo = ExitStack()

    def step_ended(self, number: int) -> None:
        if number == FIRST:
            self._begin()
        elif number == FIRST + NUM_STEPS:
            self._end()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.step_ended(batch_idx)

    def _begin(self) -> None:
        synchronize(self.device)
        activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if self.device == "cuda" else [])
        self._profile = profile(activities=activities)
        self._profile.__enter__()
        if self.device == "cuda":
            self._undo.enter_context(warnings.catch_warnings())
            warnings.simplefilter("always")
            warnings.showwarning = self._warned
            torch.cuda.set_sync_debug_mode("warn")
            self._undo.callback(torch.cuda.set_sync_debug_mode, "default")

    def _end(self) -> None:
        self._undo.close()
        self._profile.__exit__(None, None, None)
        for event in self._profile.events():
            # Names of asynchronous copies begin with those of blocking ones.
            if (event.name.startswith(_WAITS) and "Async" not in event.name) or event.name in _READS:
                self.calls[event.name] += 1

    def _warned(self, message: Any, *_: Any, **__: Any) -> None:
        if "called a synchronizing" not in str(message):
            return
        for frame in reversed(traceback.extract_stack()[:-1]):
            parts = Path(frame.filename).parts
            owner = next((owner for owner in _OWNERS if owner in parts), None)
            if owner is not None:
                self.by_owner[owner] += 1
                self.places[f"{'/'.join(parts[parts.index(owner) :])}:{frame.lineno} {frame.name}"] += 1
                return
        self.by_owner["torch"] += 1

    def calls_per_step(self) -> dict[str, float]:
        return {name: count / NUM_STEPS for name, count in self.calls.items()}


def by_hand(device: str) -> Window:
    """Count waits in the hand-written loop."""
    model, window = Plain().to(device), Window(device)
    optimizer = model.configure_optimizers()
    for number, batch in enumerate(OnDevice(device)):
        optimizer.zero_grad()
        model.training_step(batch, number).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        window.step_ended(number)
    return window


def under(options: dict[str, Any], device: str) -> Window:
    """Count waits in a fit with these Trainer options."""
    window = Window(device)
    trainer = quiet_trainer(max_epochs=1, gradient_clip_val=1.0, callbacks=[window], **options)
    trainer.fit(Plain(), DataLoader(OnDevice(device), batch_size=None))
    return window


def waits(label: str, device: str) -> Facts:
    """Count waits under a strategy, under Lightning's single-device strategy, and in the hand-written loop."""
    facts, options = Facts(), options_of(label, device)
    counted = under(options, device)
    facts["calls per step"] = counted.calls_per_step()
    facts["waits per step"] = {owner: count / NUM_STEPS for owner, count in counted.by_owner.items()}
    facts["places"] = dict(counted.places.most_common(8))
    facts["by hand"] = by_hand(device).calls_per_step()
    facts["Lightning's single device"] = under(options | {"strategy": "auto"}, device).calls_per_step()
    waits_in_step = label in _FREE_OF_WAITS and counted.by_owner["lightning_paral"]
    facts.require(not waits_in_step, f"lightning_paral waits in the step: {dict(counted.places)}")
    return facts
