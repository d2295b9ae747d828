"""A user's script in which rank 0 is stopped while it saves a checkpoint: `stopped.py FOLDER`."""

import os
import signal
import sys
from pathlib import Path

import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from tests.contract.cases import strategy_of
from tests.distributed.hangs.sleeping import Sleeper
from tests.models.regression import Regression, regression_data
from tests.running import quiet_trainer


class Stopped(Sleeper):
    """The process of rank 0 stops itself."""

    def sleep_at(self, stage: str) -> None:
        if stage == self.stage and self.global_rank == self.rank:
            os.kill(os.getpid(), signal.SIGSTOP)


def main(folder: str) -> None:
    torch.set_num_threads(1)
    # Both ranks have started when the timeout of the second fit begins.
    quiet_trainer(devices=2, max_steps=1, strategy="paral_ddp").fit(Regression(), regression_data(1, 2))
    trainer = quiet_trainer(
        devices=2,
        max_epochs=1,
        strategy=strategy_of("paral_ddp", timeout=3.0),
        callbacks=[ModelCheckpoint(folder)],
        enable_checkpointing=True,
    )
    model = Stopped("on_save_checkpoint", 0, Path(folder, "awake"))
    trainer.fit(model, regression_data(3, 2), regression_data(2, 2))


if __name__ == "__main__":
    main(sys.argv[1])
