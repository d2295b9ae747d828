"""A fit in which one rank sleeps, and what the ranks log of it."""

import logging
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor

from lightning_paral.distributed.process_group import release_process_group
from tests.contract.cases import strategy_of
from tests.launching import leave_pool
from tests.models.regression import Regression, regression_data
from tests.running import quiet_trainer


class Sleeper(Regression):
    """Rank `rank` sleeps at `stage` until the file `awake` exists, for a minute at most."""

    def __init__(self, stage: str, rank: int, awake: Path) -> None:
        super().__init__()
        self.stage, self.rank, self.awake = stage, rank, awake

    def sleep_at(self, stage: str) -> None:
        deadline = time.monotonic() + 60.0
        if stage == self.stage and dist.get_rank() == self.rank:
            while not self.awake.exists() and time.monotonic() < deadline:
                time.sleep(0.1)

    def configure_model(self) -> None:
        self.sleep_at("configure_model")

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if batch_idx == 1:
            self.sleep_at("training_step")
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.sleep_at("validation_step")
        self.log("val", self(batch[0]).sum(), sync_dist=True)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.sleep_at("on_save_checkpoint")


class Logged(logging.Handler):
    """Keeps the messages of this package, and creates a file once one of them contains `sign`."""

    def __init__(self, sign: str = "", found: Path | None = None) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []
        self._sign, self._found = sign, found

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())
        if self._found is not None and self._sign in self.messages[-1]:
            self._found.touch()


def fit_with_own_group(
    label: str,
    model: Regression,
    logged: Logged,
    folder: str,
    timeout: float,
    *callbacks: Callback,
    num_batches: int = 3,
) -> str:
    """Fit in a process group that the strategy creates; return the error, or an empty string."""
    leave_pool()
    logging.getLogger("lightning_paral").addHandler(logged)
    trainer = quiet_trainer(
        devices=2,
        max_epochs=1,
        strategy=strategy_of(label, timeout=timeout),
        callbacks=[ModelCheckpoint(folder), *callbacks],
        enable_checkpointing=True,
    )
    try:
        trainer.fit(model, regression_data(num_batches, 2), regression_data(2, 2))
        return ""
    except (Exception, SIGTERMException) as error:
        return str(error) or type(error).__name__
    finally:
        logging.getLogger("lightning_paral").removeHandler(logged)
        release_process_group(after_failure=True)
