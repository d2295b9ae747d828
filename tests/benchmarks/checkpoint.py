"""Times of saving and loading a checkpoint of 2.4 GB under `paral_fsdp` on two ranks, beside Distributed Checkpoint.

    python -m tests.benchmarks.checkpoint --folder /disk

The example's GPT with 202 million parameters and Adam's state. Saving: as shards (`save`); with `async_save=True`,
until training goes on (`stall`); gathered on rank 0 (`full`). `dcp_save` and `dcp_stall` are `save` and `async_save` of
`torch.distributed.checkpoint` for the same tensors. `read` reads the files as bytes, each rank a half, and `load`
verifies and loads them; both read from the disk, not from the page cache. `host_mb` and `dcp_host_mb` are what a save
adds to the memory of a rank at its peak. All take turns in each round; the table has the medians.
"""

import argparse
import os
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from lightning.pytorch import Callback, LightningModule, Trainer

from examples.gpt import GPT, StandardLibraryData
from lightning_paral import CheckpointOptions, ParalFSDPStrategy
from lightning_paral.cli.checkpoints import consolidate
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
    return sorted(part for part in folder.rglob("*") if part.is_file())


def drop_from_cache(folder: Path) -> None:
    for part in files_of(folder):
        with open(part, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def own_memory() -> int:
    """Return the memory of this process that no file backs, in bytes."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(next(line.split()[1] for line in status.splitlines() if line.startswith("RssAnon")))


class Peak:
    """Samples the memory of this process while it is open. `mb` is what was added at the peak."""

    def __enter__(self) -> "Peak":
        self._before, self._peak, self._done = own_memory(), 0, threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def _sample(self) -> None:
        while not self._done.wait(0.005):
            self._peak = max(self._peak, own_memory())

    def __exit__(self, *_: Any) -> None:
        self._done.set()
        self._thread.join()
        self.mb = max(0, self._peak - self._before) / 1e6


class Saves(Callback):
    """Saves after the first step in each way in turn, and loads what was saved as shards."""

    def __init__(self, folder: Path, rounds: int) -> None:
        self.folder, self.rounds = folder, rounds
        self.found: dict[str, list[float]] = defaultdict(list)

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
        strategy: Any = trainer.strategy
        state = {"model": dict(module.named_parameters()), "optimizer": {}}
        for name, parameter in module.named_parameters():
            state["optimizer"][name] = dict(strategy.optimizers[0].state[parameter])
        group = dist.new_group(backend="gloo")
        for _round in range(self.rounds):
            for kind, options in OPTIONS.items():
                strategy._checkpoint_options = options
                path = self.folder / kind
                with Peak() as peak:
                    self.note(kind, lambda path=path: trainer.save_checkpoint(path))
                    strategy.finish_saving()
                dist.barrier()
                self.found[f"{kind}_host_mb"].append(peak.mb)
            with Peak() as peak:
                self.note("dcp_save", lambda: dcp.save(state, checkpoint_id=self.folder / "dcp", process_group=group))
            self.found["dcp_save_host_mb"].append(peak.mb)
            saving: list[Any] = []
            place = self.folder / "dcp_stall"
            with Peak() as peak:
                self.note(
                    "dcp_stall",
                    lambda place=place, saving=saving: saving.append(
                        dcp.async_save(state, checkpoint_id=place, process_group=group)
                    ),
                )
                saving[0].result()
            self.found["dcp_stall_host_mb"].append(peak.mb)
            drop_from_cache(self.folder / "save")
            self.note("read", self.read)
            drop_from_cache(self.folder / "save")
            self.note("load", lambda: self.load(strategy))

    def read(self) -> None:
        buffer = bytearray(2**20)
        for path in files_of(self.folder / "save")[dist.get_rank() :: 2]:
            with open(path, "rb", buffering=0) as file:
                while file.readinto(buffer):
                    pass

    def load(self, strategy: Any) -> None:
        checkpoint = strategy.load_checkpoint(self.folder / "save")
        strategy.load_model_state_dict(checkpoint)
        strategy.load_optimizer_state_dict(checkpoint)

    def note(self, what: str, action: Callable[[], Any]) -> None:
        dist.barrier()
        self.found[what].append(timed(lambda: (action(), dist.barrier())))


def save_and_load(folder: str, rounds: int, width: int) -> dict[str, list[float]]:
    """Return the seconds of each round. *Collective*."""
    torch.manual_seed(0)
    saves = Saves(Path(folder), rounds)
    trainer = quiet_trainer(
        strategy=ParalFSDPStrategy(), devices=2, max_steps=1, limit_val_batches=0, callbacks=[saves]
    )
    trainer.fit(GPT(width, num_layers=16, num_heads=16), StandardLibraryData(batch_size=2))
    return dict(saves.found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", default=".", help="on the disk to be measured")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--width", type=int, default=1024)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder, silent_ranks() as on_ranks:
        found = on_ranks(2, save_and_load, folder, options.rounds, options.width)[0]
        source, out = Path(folder, "save"), Path(folder, "out.ckpt")
        found["consolidate"] = []
        for _ in range(options.rounds):
            drop_from_cache(source)
            with redirect_stdout(sys.stderr):
                found["consolidate"].append(timed(lambda: consolidate([str(source), str(out)])))
            out.unlink()
        size = sum(part.stat().st_size for part in files_of(source))
    show([{"what": "size_bytes", "median": size}] + [{"what": k, "median": median(v)} for k, v in found.items()])


if __name__ == "__main__":
    main()
