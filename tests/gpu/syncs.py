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

from tests.gpu.place import options_of, synchronize
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


class Window:
    """Counts waits between `begin` and `end`."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.calls: Counter[str] = Counter()
        self.by_owner: Counter[str] = Counter()
        self.places: Counter[str] = Counter()
        self._undo = ExitStack()

    def begin(self) -> None:
        synchronize(self.device)
        activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if self.device == "cuda" else [])
        self._profile = profile(activities=activities)
        self._profile.__enter__()
        if self.device == "cuda":
            self._undo.enter_context(warnings.catch_warnings())
            warnings.simplefilter("always")
            warnings.showwarning = self._warned
            torch.cuda.set_sync_debug_mode("warn")

    def end(self) -> None:
        if self.device == "cuda":
            torch.cuda.set_sync_debug_mode("default")
        self._undo.close()
        self._profile.__exit__(None, None, None)
        for event in self._profile.events():
            if event.name.startswith(_WAITS) or event.name in _READS:
                self.calls[event.name] += 1
        # Names of asynchronous copies begin with those of blocking ones.
        for name in [name for name in self.calls if "Async" in name]:
            del self.calls[name]

    def _warned(self, message: Any, *_: Any, **__: Any) -> None:
        if "called a synchronizing" not in str(message):
            return
        for frame in reversed(traceback.extract_stack()[:-1]):
            parts = Path(frame.filename).parts
            owner = next((owner for owner in _OWNERS if owner in parts), None)
            if owner is not None:
                self.by_owner[owner] += 1
                where = "/".join(parts[parts.index(owner) :])
                self.places[f"{where}:{frame.lineno} {frame.name}"] += 1
                return
        self.by_owner["torch"] += 1

    def facts(self) -> dict[str, Any]:
        """Return counts per step."""
        calls = {name: count / NUM_STEPS for name, count in self.calls.items()}
        owners = {owner: count / NUM_STEPS for owner, count in self.by_owner.items()}
        return {"calls per step": calls, "waits per step": owners, "places": dict(self.places.most_common(8))}


class Counting(Callback):
    """Counts waits in a window of steps of a fit."""

    def __init__(self, window: Window) -> None:
        self.window = window

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == FIRST:
            self.window.begin()
        elif batch_idx == FIRST + NUM_STEPS:
            self.window.end()


def by_hand(device: str) -> Window:
    """Count waits in the hand-written loop."""
    model = Plain().to(device)
    optimizer = model.configure_optimizers()
    window = Window(device)
    for number, batch in enumerate(OnDevice(device)):
        optimizer.zero_grad()
        model.training_step(batch, number).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if number == FIRST:
            window.begin()
        elif number == FIRST + NUM_STEPS:
            window.end()
    return window


def under(options: dict[str, Any], device: str) -> Window:
    """Count waits in a fit with these Trainer options."""
    window = Window(device)
    trainer = quiet_trainer(max_epochs=1, gradient_clip_val=1.0, callbacks=[Counting(window)], **options)
    trainer.fit(Plain(), DataLoader(OnDevice(device), batch_size=None))
    return window


def waits(label: str, device: str) -> dict[str, Any]:
    """Count waits under a strategy, under Lightning's single-device strategy, and in the hand-written loop."""
    facts: dict[str, Any] = {"failures": []}
    options = options_of(label, device)
    counted = under(options, device)
    facts |= counted.facts()
    facts["by hand"] = by_hand(device).facts()["calls per step"]
    facts["Lightning's single device"] = under(options | {"strategy": "auto"}, device).facts()["calls per step"]
    if label in _FREE_OF_WAITS and counted.by_owner["lightning_paral"]:
        facts["failures"].append(f"lightning_paral waits in the step: {dict(counted.places)}")
    return facts
