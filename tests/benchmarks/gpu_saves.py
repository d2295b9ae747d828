"""Measure for how long a synchronous or asynchronous save stops training, next to `torch.save` of the same state."""

import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback
from torch.utils.data import DataLoader

from lightning_paral import CheckpointOptions
from tests.benchmarks.common import differences
from tests.benchmarks.gpu_loops import make_trainer
from tests.benchmarks.gpu_models import SIZES, Measured, Tokens
from tests.gpu.crew import leave
from tests.gpu.place import check_installed, root_device, synchronize

NUM_SAVES = 3
_EVERY = 4
"""Steps between saves: those after a save show the speed of training during a save in the background."""


class Saving(Callback):
    """Saves every few steps, by the Trainer or by `torch.save`; records how long saves and steps take."""

    def __init__(self, path: Path, device: str, by_torch: bool) -> None:
        self.path, self.device, self.by_torch = path, device, by_torch
        self.stalls: list[float] = []
        self.ends: list[float] = []
        self.num_bytes = 0

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        synchronize(self.device)
        began = time.perf_counter()
        self.ends.append(began)
        if batch_idx % _EVERY != 1 or len(self.stalls) == NUM_SAVES:
            return
        if self.by_torch:
            state = {"model": pl_module.state_dict(), "optimizer": trainer.optimizers[0].state_dict()}
            torch.save(state, self.path)
        else:
            trainer.save_checkpoint(self.path)
        synchronize(self.device)
        self.stalls.append(time.perf_counter() - began)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if (saver := getattr(trainer.strategy, "_saver", None)) is not None:
            saver.wait()
        files = [self.path, *self.path.rglob("*")]
        self.num_bytes = sum(file.stat().st_size for file in files if file.is_file())
        shutil.rmtree(self.path.parent, ignore_errors=True)
        if self.device == "cuda":
            leave(self.result())

    def result(self) -> dict[str, Any]:
        return {"stalls": self.stalls, "steps": differences(self.ends, 0), "num_bytes": self.num_bytes}


def measure_saves(name: str, how: str, size_name: str, device: str) -> dict[str, Any]:
    """Return for how many seconds saves stop training.

    Args:
        name: name of the strategy.
        how: `"sync"`, `"async"` or `"torch.save"`.
        size_name: key of `SIZES`.
        device: `"cuda"` or `"cpu"`.
    """
    check_installed(name)
    size = SIZES[size_name]
    with tempfile.TemporaryDirectory(prefix="gpu-saves-", ignore_cleanup_errors=True) as folder:
        saving = Saving(Path(folder, "saved.ckpt"), device, how == "torch.save")
        trainer = make_trainer(name, size, device, [saving], checkpoint=CheckpointOptions(async_save=how == "async"))
        batches = Tokens(size, _EVERY * (NUM_SAVES + 1), root_device(device))
        trainer.fit(Measured(size), DataLoader(batches, batch_size=None))
        return saving.result()
