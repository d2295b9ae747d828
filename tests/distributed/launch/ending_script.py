"""A user's training script of which one part goes wrong or takes long: `ending_script.py PART`."""

import os
import sys
import threading
import time

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from lightning_paral.errors import RankFailedError
from tests.models.regression import Regression, regression_data
from tests.running import quiet_trainer

PART = sys.argv[1]


class FailsOnRankOne(Regression):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if batch_idx == 1 and self.global_rank == 1:
            raise ValueError("my bug")
        return super().training_step(batch, batch_idx)


class Hooks(Callback):
    """A user's callback."""

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if PART == "raising hook":
            raise OSError("my upload failed")
        if PART == "slow hook" and trainer.global_rank == 1:
            time.sleep(3.5)


def main() -> None:
    trainer = quiet_trainer(strategy="paral_ddp", devices=2, max_epochs=1, callbacks=[Hooks()])
    if PART == "slow hook":
        trainer.fit(FailsOnRankOne(), regression_data(4, 2))
        return
    try:
        trainer.fit(FailsOnRankOne(), regression_data(4, 2))
    except (ValueError, RankFailedError, OSError):
        if trainer.global_rank == 1:
            time.sleep(5.0)  # longer than the launcher's patience after a failure
        threads = [thread.name for thread in threading.enumerate() if thread.name == "lightning_paral_watcher"]
        os.write(1, f"rank {trainer.global_rank}: handled, {threads}\n".encode())


if __name__ == "__main__":
    main()
