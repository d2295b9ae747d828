"""Measure for how long a synchronous or asynchronous save stops training, next to `torch.save` of the same state."""

import itertools
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback
from torch.utils.data import DataLoader

from lightning_paral import CheckpointOptions
from tests.benchmarks.gpu_loops import make_trainer
from tests.benchmarks.gpu_models import SIZES, Measured, Tokens
from tests.gpu.crew import leave
from tests.gpu.place import check_installed, synchronize

NUM_SAVES = 3
_EVERY = 4
"""Steps between saves: those after a save show the speed of training during a save in the background."""


class Saving(Callback):
    """Saves every few steps; records how long saves and steps take."""

    def __init__(self, folder: Path, device: str) -> None:
        self.folder, self.device = folder, device
        self.stalls: list[float] = []
        self.ends: list[float] = []
        self.num_bytes = 0

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        synchronize(self.device)
        self.ends.append(time.perf_counter())
        if batch_idx % _EVERY == 1 and len(self.stalls) < NUM_SAVES:
            began = time.perf_counter()
            trainer.save_checkpoint(self.folder / "saved.ckpt")
            synchronize(self.device)
            self.stalls.append(time.perf_counter() - began)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        saver = getattr(trainer.strategy, "_saver", None)
        if saver is not None:
            saver.wait()
        path = self.folder / "saved.ckpt"
        files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
        self.num_bytes = sum(file.stat().st_size for file in files)
        shutil.rmtree(self.folder, ignore_errors=True)
        if trainer.strategy.root_device.type == "cuda":
            leave(self.result())

    def result(self) -> dict[str, Any]:
        steps = [after - before for before, after in itertools.pairwise(self.ends)]
        return {"stalls": self.stalls, "steps": steps, "num_bytes": self.num_bytes}


class TorchSaving(Saving):
    """Saves the state dicts with `torch.save`, as a hand-written loop does."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        synchronize(self.device)
        self.ends.append(time.perf_counter())
        if batch_idx % _EVERY == 1 and len(self.stalls) < NUM_SAVES:
            began = time.perf_counter()
            state = {"model": pl_module.state_dict(), "optimizer": trainer.optimizers[0].state_dict()}
            with open(self.folder / "saved.ckpt", "wb") as file:
                torch.save(state, file)
            self.stalls.append(time.perf_counter() - began)


def measure_saves(name: str, how: str, size_name: str, device_type: str) -> dict[str, Any]:
    """Return for how many seconds saves stop training.

    Args:
        name: name of the strategy.
        how: `"sync"`, `"async"` or `"torch.save"`.
        size_name: key of `SIZES`.
        device_type: `"cuda"` or `"cpu"`.
    """
    check_installed(name)
    size = SIZES[size_name]
    device = torch.device("cuda", 0) if device_type == "cuda" else torch.device("cpu")
    folder = Path(tempfile.mkdtemp(prefix="gpu-saves-"))
    try:
        saving = (TorchSaving if how == "torch.save" else Saving)(folder, device_type)
        options = CheckpointOptions(async_save=how == "async")
        trainer = make_trainer(name, size, device, [saving], checkpoint=options)
        batches = Tokens(size, _EVERY * (NUM_SAVES + 1), device)
        trainer.fit(Measured(size), DataLoader(batches, batch_size=None))
        return saving.result()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
