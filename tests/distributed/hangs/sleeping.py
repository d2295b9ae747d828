"""A fit in which one rank sleeps, and what the ranks log of it."""

import logging
import os
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_paral.distributed.process_group import release_process_group
from tests.contract.cases import strategy_of
from tests.launching import leave_pool
from tests.models.regression import Regression, samples
from tests.running import quiet_trainer


def sleep_until(awake: Path) -> None:
    """Sleep until the file `awake` exists, for a minute at most."""
    deadline = time.monotonic() + 60.0
    while not awake.exists() and time.monotonic() < deadline:
        time.sleep(0.1)


class Sleeper(Regression):
    """Rank `rank` sleeps at `stage` until the file `awake` exists; at "loader", a worker of its loader does."""

    def __init__(self, stage: str, rank: int, awake: Path) -> None:
        super().__init__()
        self.stage, self.rank, self.awake = stage, rank, awake

    def sleep_at(self, stage: str) -> None:
        if stage == self.stage and dist.get_rank() == self.rank:
            sleep_until(self.awake)

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
    models: list[Sleeper],
    logged: Logged,
    folder: str,
    timeout: float,
    num_batches: int = 3,
) -> str:
    """Fit one model after the other in a process group that the strategies create; return the error, or ""."""
    leave_pool()
    logging.getLogger("lightning_paral").addHandler(logged)
    try:
        for model in models:
            trainer = quiet_trainer(
                devices=2,
                max_epochs=1,
                strategy=strategy_of(label, timeout=timeout),
                callbacks=[ModelCheckpoint(folder)],
                enable_checkpointing=True,
            )
            options: dict[str, Any] = {}
            if model.stage == "loader":
                is_asleep = model.rank == int(os.environ["RANK"])
                sleep = partial(_sleep_in_worker, model.awake if is_asleep else Path(folder))
                options = {"num_workers": 1, "worker_init_fn": sleep}
            trainer.fit(model, DataLoader(samples(num_batches), 6, **options), DataLoader(samples(2), 6))
        return ""
    except (Exception, SIGTERMException) as error:
        return "\n".join([str(error) or type(error).__name__, *getattr(error, "__notes__", ())])
    finally:
        logging.getLogger("lightning_paral").removeHandler(logged)
        release_process_group(after_failure=True)


def _sleep_in_worker(awake: Path, worker: int) -> None:
    sleep_until(awake)
