"""Kill a rank of two in batch 6; rank 0 saves if it lives and has everything: `survived.py FOLDER STRATEGY RANK`."""

import os
import signal
import sys
from pathlib import Path
from typing import Any

from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from tests.launching import fork_ranks
from tests.models.resumable import Resumable, losses

KILLED_IN = 6
"""The batch in which the rank dies: the first after an optimizer step."""


class Killed(Resumable):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == KILLED_IN and self.global_rank == int(sys.argv[3]):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().training_step(batch, batch_idx)


def train(folder: Path, strategy: str) -> None:
    saves = ModelCheckpoint(folder, "failed-{step}", save_on_exception=True, save_top_k=0)
    losses(strategy, Killed, callbacks=[saves], enable_checkpointing=True)


if __name__ == "__main__":
    folder, strategy = Path(sys.argv[1]), sys.argv[2]
    for child in fork_ranks(2, folder.with_name("store"), lambda _: train(folder, strategy)):
        os.waitpid(child, 0)
