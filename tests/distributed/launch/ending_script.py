"""A user's training script of which one part goes wrong or takes long: `ending_script.py PART [START_METHOD]`."""

import os
import signal
import sys
import threading
import time
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from lightning_paral import ParalDDPStrategy, Preemption
from lightning_paral.errors import RankFailedError
from tests.models.regression import Regression, regression_data
from tests.running import quiet_trainer

PART = sys.argv[1]


def say(rank: int, what: str) -> None:
    os.write(1, f"rank {rank}: {what}\n".encode())


class FailsOnRankOne(Regression):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if batch_idx == 1 and self.global_rank == 1 and PART != "preempted":
            raise ValueError("my bug")
        return super().training_step(batch, batch_idx)


class Hooks(Callback):
    """A user's callback."""

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if PART == "raising hook":
            raise OSError("my upload failed")
        if PART == "preempted" and trainer.global_rank == 0:
            time.sleep(5.0)  # longer than the launcher's patience with ranks that end early
            say(0, "uploaded")
        if PART == "slow hook" and trainer.global_rank == 1:
            time.sleep(3.5)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if PART == "preempted" and batch_idx == 1 and trainer.global_rank == 0:
            os.kill(os.getpid(), signal.SIGTERM)


def main() -> None:
    callbacks: list[Callback] = [Hooks()]
    if PART == "preempted":
        callbacks.append(Preemption(dirpath=sys.argv[3], exit_status=0))
    strategy = ParalDDPStrategy(start_method=None if len(sys.argv) < 3 or sys.argv[2] == "popen" else sys.argv[2])
    trainer = quiet_trainer(strategy=strategy, devices=2, max_epochs=1, callbacks=callbacks)
    if PART in ("preempted", "slow hook"):
        trainer.fit(FailsOnRankOne(), regression_data(4, 2))
        return
    try:
        trainer.fit(FailsOnRankOne(), regression_data(4, 2))
    except (ValueError, RankFailedError, OSError):
        if trainer.global_rank == 1:
            time.sleep(5.0)  # longer than the launcher's patience after a failure
        threads = [thread.name for thread in threading.enumerate() if thread.name == "lightning_paral_watcher"]
        say(trainer.global_rank, f"handled, {threads}")


if __name__ == "__main__":
    main()
