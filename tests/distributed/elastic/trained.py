"""A user's training script for the elastic tests: `trained.py FOLDER STRATEGY NUM_STEPS SECONDS_PER_STEP`.

Each rank appends what it sees to a file in `FOLDER/seen`, one line per step.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch
from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_paral import AutoResume, ParalDDPStrategy
from tests.models.witnessed import Witnessed, numbered_loader
from tests.running import quiet_trainer

SAVED_EVERY = 5


class Recorded(Witnessed):
    """Writes what it sees to a file as soon as it sees it, because the process may be killed."""

    def __init__(self, folder: Path, seconds_per_step: float) -> None:
        super().__init__()
        self.seconds_per_step = seconds_per_step
        self.file = folder / "seen" / f"{os.getpid()}.jsonl"

    def saw(self, epoch: int, step: int, numbers: list[int], loss: float) -> None:
        seen = {
            "time": time.time(),
            "run": getattr(getattr(self.trainer.strategy, "_watch", None), "name", ""),
            "rank": self.global_rank,
        }
        with open(self.file, "a") as file:
            file.write(json.dumps(seen | {"epoch": epoch, "step": step, "numbers": numbers, "loss": loss}) + "\n")
        time.sleep(self.seconds_per_step)


def main(folder: Path, strategy: str, num_steps: int, seconds_per_step: float) -> None:
    torch.set_num_threads(1)
    seed_everything(7, verbose=False)
    (folder / "seen").mkdir(parents=True, exist_ok=True)
    checkpoints = str(folder / "checkpoints")
    saving = {"every_n_train_steps": SAVED_EVERY, "save_top_k": 3, "monitor": "step", "mode": "max"}
    trainer = quiet_trainer(
        strategy="auto" if strategy == "auto" else ParalDDPStrategy(split="global", timeout=60),
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        max_steps=num_steps,
        enable_checkpointing=True,
        callbacks=[AutoResume(checkpoints), ModelCheckpoint(checkpoints, filename="{step}", **saving)],
    )
    trainer.fit(Recorded(folder, seconds_per_step), numbered_loader())


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), float(sys.argv[4]))
