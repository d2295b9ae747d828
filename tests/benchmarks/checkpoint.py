"""Saving, loading and consolidating a checkpoint of 200 million parameters with Adam's state, on two ranks.

    python -m tests.benchmarks.checkpoint [FOLDER]

Beside each figure stands what it is measured against, in the same process and on the same disk (FOLDER, or a temporary
one): gathering on rank 0 and `torch.save`, which is what Lightning's full save does; reading the bytes into memory of
their own, and through one small buffer, which keeps none of them; copying a file; DeepSpeed's `zero_to_fp32`. What is
written is flushed to the disk, and what is read comes from there or from the page cache. Medians of interleaved rounds.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule
from tabulate import tabulate
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.utils.data import DataLoader

from lightning_paral import CheckpointOptions, ParalFSDPStrategy
from tests.rank_pool import RankPool
from tests.running import quiet_trainer

WIDTH = 2048
NUM_LAYERS = 48
ROUNDS = 5


class Wide(LightningModule):
    """A model of 48 square layers with 201 million parameters."""

    def __init__(self, num_layers: int = NUM_LAYERS) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(num_layers))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = torch.ones(1, WIDTH)
        for layer in self.layers:
            x = layer(x)
        return x.mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-6)


def timed(action: Callable[[], Any]) -> float:
    """Return the seconds until all ranks have finished."""
    dist.barrier()
    begin = time.perf_counter()
    action()
    dist.barrier()
    return time.perf_counter() - begin


def synced(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def drop_from_cache(folder: Path) -> None:
    for path in folder.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def read_to_memory(path: Path) -> None:
    with open(path, "rb", buffering=0) as file:
        data = memoryview(bytearray(path.stat().st_size))
        position = 0
        while position < len(data):
            position += file.readinto(data[position : position + 2**24])


def read_through_buffer(path: Path) -> None:
    with open(path, "rb", buffering=0) as file:
        buffer = bytearray(2**24)
        while file.readinto(buffer):
            pass


class Measured(Callback):
    """Measures the time of saving and loading after the first step."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.seconds: dict[str, list[float]] = {}

    def note(self, name: str, action: Callable[[], Any]) -> None:
        self.seconds.setdefault(name, []).append(timed(action))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        strategy = trainer.strategy
        path = self.folder / "sharded"
        for _ in range(ROUNDS):
            self.note("sharded save", lambda: trainer.save_checkpoint(path))
            self.note("gather and torch.save", lambda: self.gather_and_save(strategy))
            strategy._checkpoint_options = CheckpointOptions(async_save=True)
            self.note("async save, until it returns", lambda: trainer.save_checkpoint(self.folder / "async"))
            strategy._saver.wait()
            strategy._checkpoint_options = CheckpointOptions()
            mine = path / f"__{strategy.global_rank}_0.distcp"
            reading = {
                "read to memory": partial(read_to_memory, mine),
                "read through a buffer": partial(read_through_buffer, mine),
                "load": partial(self.load, strategy, path),
            }
            for name, action in reading.items():
                self.note(f"{name}, from the page cache", action)
                drop_from_cache(path)
                self.note(f"{name}, from the disk", action)

    def gather_and_save(self, strategy: Any) -> None:
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        model, optimizer = strategy.lightning_module, strategy.optimizers[0]
        state = {
            "state_dict": get_model_state_dict(model, options=options),
            "optimizer_states": [get_optimizer_state_dict(model, optimizer, options=options)],
        }
        if strategy.global_rank == 0:
            torch.save(state, self.folder / "gathered.ckpt")
            synced(self.folder / "gathered.ckpt")

    def load(self, strategy: Any, path: Path) -> None:
        checkpoint = strategy.load_checkpoint(path)
        strategy.load_model_state_dict(checkpoint)
        strategy.load_optimizer_state_dict(checkpoint)


def save_and_load(folder: str) -> dict[str, float]:
    measured = Measured(Path(folder))
    trainer = quiet_trainer(
        max_steps=1, devices=2, strategy=ParalFSDPStrategy(timeout=_long()), callbacks=[measured], max_epochs=1
    )
    trainer.fit(Wide(), DataLoader(range(2)))  # type: ignore[arg-type]
    return {name: median(seconds) for name, seconds in measured.seconds.items()}


def _long() -> Any:
    from datetime import timedelta

    return timedelta(minutes=10)


CONSOLIDATE = """
import sys, threading, time
from lightning_paral.cli.consolidate import consolidate

def anonymous_bytes():
    for line in open("/proc/self/status"):
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024

peak = before = anonymous_bytes()
running = True
def watch():
    global peak
    while running:
        peak = max(peak, anonymous_bytes())
        time.sleep(0.005)
watcher = threading.Thread(target=watch)
watcher.start()
begin = time.perf_counter()
consolidate(sys.argv[1:])
seconds = time.perf_counter() - begin
running = False
watcher.join()
print("MEASURED", seconds, peak - before)
"""


def consolidated(source: Path, out: Path, *options: str) -> tuple[float, float]:
    """Return the seconds, and the growth of anonymous memory in MiB."""
    command = [sys.executable, "-c", CONSOLIDATE, str(source), str(out), *options]
    printed = subprocess.run(command, check=True, capture_output=True, text=True, timeout=600).stdout
    _, seconds, growth_bytes = printed.splitlines()[-1].split()
    return float(seconds), int(growth_bytes) / 2**20


def copied(source: Path, target: Path) -> float:
    begin = time.perf_counter()
    shutil.copyfile(source, target)
    synced(target)
    return time.perf_counter() - begin


def consolidated_and_copied(folder: Path) -> tuple[float, float, float]:
    """Return the seconds of each, and the growth of anonymous memory in MiB."""
    for name in ("whole.ckpt", "copy.ckpt"):
        (folder / name).unlink(missing_ok=True)
    spent, growth = consolidated(folder / "sharded", folder / "whole.ckpt")
    return spent, copied(folder / "whole.ckpt", folder / "copy.ckpt"), growth


def save_with_deepspeed(folder: str) -> None:
    from lightning.pytorch.strategies import DeepSpeedStrategy

    from lightning_paral import ParalZeROStrategy

    class Saving(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            trainer.strategy.exclude_frozen_parameters = False
            checkpoint = trainer._checkpoint_connector.dump_checkpoint(True)
            DeepSpeedStrategy.save_checkpoint(trainer.strategy, checkpoint, folder)

    strategy = ParalZeROStrategy(stage=3, timeout=_long())
    quiet_trainer(max_steps=1, devices=2, strategy=strategy, callbacks=[Saving()]).fit(Wide(), DataLoader(range(2)))  # type: ignore[arg-type]


ZERO_TO_FP32 = """
import resource, sys, time
from deepspeed.utils.zero_to_fp32 import convert_zero_checkpoint_to_fp32_state_dict
begin = time.perf_counter()
convert_zero_checkpoint_to_fp32_state_dict(sys.argv[1], sys.argv[2], max_shard_size="100GB")
print("MEASURED", time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


def main(folder: Path) -> None:
    pool = RankPool()
    try:
        (seconds, _) = pool.run(2, save_and_load, str(folder), timeout=580)
        gathered = seconds["gather and torch.save"]
        saved = seconds["sharded save"]
        rows = [
            ("sharded save", saved, "gather and torch.save", gathered, saved / gathered),
            ("async save, until it returns", seconds["async save, until it returns"], "sharded save", saved, 0.0),
        ]
        rows[1] = (*rows[1][:4], rows[1][1] / saved)
        for where in ("from the page cache", "from the disk"):
            load = seconds[f"load, {where}"]
            for how in ("read to memory", "read through a buffer"):
                read = seconds[f"{how}, {where}"]
                rows.append((f"load, {where}", load, how, read, load / read))
        rounds = [consolidated_and_copied(folder) for _ in range(ROUNDS)]
        spent, plain, growth = median(r[0] for r in rounds), median(r[1] for r in rounds), max(r[2] for r in rounds)
        rows.append((f"consolidate, +{growth:.0f} MiB anonymous memory", spent, "copy the file", plain, spent / plain))
        for name in ("whole.ckpt", "copy.ckpt", "gathered.ckpt"):
            (folder / name).unlink()
        shutil.rmtree(folder / "async")
        shutil.rmtree(folder / "sharded")
        pool.run(2, save_with_deepspeed, str(folder / "deepspeed"), timeout=580)
    finally:
        pool.close()
    spent, growth = consolidated(folder / "deepspeed", folder / "weights.ckpt", "--weights-only")
    command = [sys.executable, "-c", ZERO_TO_FP32, str(folder / "deepspeed"), str(folder / "theirs")]
    printed = subprocess.run(command, check=True, capture_output=True, text=True, timeout=600).stdout
    _, theirs, peak_bytes = printed.splitlines()[-1].split()
    label = f"zero_to_fp32, peak {int(peak_bytes) / 2**20:.0f} MiB"
    rows.append(
        (
            f"consolidate weights of DeepSpeed's folder, +{growth:.0f} MiB",
            spent,
            label,
            float(theirs),
            spent / float(theirs),
        )
    )
    print(tabulate(rows, headers=("", "s", "against", "s", "ratio"), floatfmt=".2f"))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory(prefix="checkpoint-") as temporary:
            main(Path(temporary))
