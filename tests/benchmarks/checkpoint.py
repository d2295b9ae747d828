"""Times of saving and loading a checkpoint of 2.4 GB under `paral_fsdp` on two ranks.

    python -m tests.benchmarks.checkpoint --folder /disk

The example's GPT with 202 million parameters and Adam's state. Saving: as shards (`save`); with `async_save=True`,
until training goes on (`stall`); gathered on rank 0 (`full`). Files are read from the disk, not from the page cache.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, Trainer

from examples.gpt import GPT, StandardLibraryData
from lightning_paral import CheckpointOptions, ParalFSDPStrategy
from lightning_paral.cli.consolidate import consolidate
from tests.benchmarks.common import show, silent_ranks
from tests.running import quiet_trainer

OPTIONS = {
    "save": CheckpointOptions(),
    "stall": CheckpointOptions(async_save=True),
    "full": CheckpointOptions("full"),
}


def timed(action: Callable[[], Any]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def files_of(folder: Path) -> list[Path]:
    return [part for part in folder.rglob("*") if part.is_file()]


def drop_from_cache(folder: Path) -> None:
    for part in files_of(folder):
        with open(part, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


class Saves(Callback):
    """Saves after the first step, and loads what was saved as shards."""

    def __init__(self, kind: str, path: Path, rounds: int) -> None:
        self.kind, self.path, self.rounds = kind, path, rounds
        self.seconds: dict[str, list[float]] = {}

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        strategy: Any = trainer.strategy
        for _round in range(self.rounds):
            self.note(self.kind, lambda: trainer.save_checkpoint(self.path))
            strategy.finish_saving()
            dist.barrier()
            if self.kind == "save":
                drop_from_cache(self.path)
                self.note("load", lambda: self.load(strategy))

    def load(self, strategy: Any) -> None:
        checkpoint = strategy.load_checkpoint(self.path)
        strategy.load_model_state_dict(checkpoint)
        strategy.load_optimizer_state_dict(checkpoint)

    def note(self, what: str, action: Callable[[], Any]) -> None:
        dist.barrier()
        self.seconds.setdefault(what, []).append(timed(lambda: (action(), dist.barrier())))


def save_and_load(kind: str, folder: str, rounds: int, width: int) -> dict[str, list[float]]:
    """Return the seconds of each round. *Collective*."""
    torch.manual_seed(0)
    saves = Saves(kind, Path(folder, kind), rounds)
    strategy = ParalFSDPStrategy(checkpoint=OPTIONS[kind])
    trainer = quiet_trainer(strategy=strategy, devices=2, max_steps=1, limit_val_batches=0, callbacks=[saves])
    trainer.fit(GPT(width, num_layers=16, num_heads=16), StandardLibraryData(batch_size=2))
    return saves.seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", default=".", help="on the disk to be measured")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--width", type=int, default=1024)
    options = parser.parse_args()
    times: dict[str, list[float]] = {"consolidate": []}
    with tempfile.TemporaryDirectory(dir=options.folder) as folder, silent_ranks() as on_ranks:
        for kind in OPTIONS:
            times |= on_ranks(2, save_and_load, kind, folder, options.rounds, options.width)[0]
        source, out = Path(folder, "save"), Path(folder, "out.ckpt")
        size = sum(part.stat().st_size for part in files_of(source))
        for _ in range(options.rounds):
            drop_from_cache(source)
            with redirect_stdout(sys.stderr):
                times["consolidate"].append(timed(lambda: consolidate([str(source), str(out)])))
            out.unlink()
    show([{"size_bytes": size} | {what: median(taken) for what, taken in times.items()}])


if __name__ == "__main__":
    main()
