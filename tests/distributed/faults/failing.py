"""A user's training script that fails: `failing.py CASE FOLDER`.

A case is written as `strategy=paral_ddp,launcher=python,fault=sigkill,...`. The rank that fails first writes the time
to `FOLDER/failed`.
"""

# ruff: noqa: E402  the stage "import" is before the imports of torch and of this package

import ctypes
import os
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any

FOLDER = Path(sys.argv[2])
CASE = dict(pair.split("=") for pair in sys.argv[1].split(","))
RANK = int(os.environ.get("RANK") or os.environ.get("LOCAL_RANK", "0"))
IS_LONG = CASE["fault"] in ("ctrl_c", "launcher_killed")
"""Whether another process ends the run, at some time after the file `failed` exists."""


class TypoError(Exception):
    """The error of the user's code."""


def note(name: str) -> None:
    """Write the time to `FOLDER/name`, unless the file exists."""
    draft = FOLDER / f"{name}-{os.getpid()}"
    draft.write_text(f"{time.time()}")
    if not (FOLDER / name).exists():
        draft.rename(FOLDER / name)


def reach(stage: str) -> None:
    """Fail if this is the rank and the stage of the case."""
    if CASE["stage"] != stage:
        return
    fault = CASE["fault"]
    if int(CASE["rank"]) != RANK:
        if fault == "others_sleep":
            note(f"busy-{RANK}")
            time.sleep(300)
        elif fault == "others_in_c":
            note(f"busy-{RANK}")
            never_return()
        return
    if fault in ("others_sleep", "others_in_c"):
        deadline = time.monotonic() + 60
        while len(list(FOLDER.glob("busy-?"))) < int(CASE["ranks"]) - 1 and time.monotonic() < deadline:
            time.sleep(0.02)
        time.sleep(0.2)  # until they sleep
    if fault == "ctrl_c" and (FOLDER / "failed").exists():
        return
    note("failed")
    fail(fault)


def fail(fault: str) -> None:
    if fault.startswith("exit"):
        sys.exit(int(fault[-1]))
    if fault.startswith("os_exit"):
        os._exit(int(fault[-1]))
    if fault == "sigkill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "sigsegv":
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        ctypes.string_at(0)
    if not IS_LONG:
        raise TypoError(f"the typo of rank {RANK}")


def never_return() -> None:
    """Wait in C for a lock that this thread holds. No signal interrupts that, and Python's GIL is free."""
    lock = ctypes.create_string_buffer(64)
    libc = ctypes.CDLL(None)
    for _ in range(2):
        libc.pthread_mutex_lock(lock)


if __name__ == "__main__":
    reach("import")

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, get_worker_info

import lightning_paral  # noqa: F401  registers the names
from tests.models.regression import FEATURES, Regression
from tests.running import quiet_trainer


class FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor) -> Tensor:
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        reach("backward")
        return gradient


class FailsWhenPickled:
    def __reduce__(self) -> Any:
        reach("save")
        return int, ()


class Samples(Dataset[Any]):
    def __len__(self) -> int:
        return 10_000 if IS_LONG else 64

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if get_worker_info() is not None and index > 30:
            reach("loader")
        return torch.full((FEATURES,), index / 64), torch.ones(2)


class Failing(Regression):
    """Reaches every stage that a step or a hook can fail in."""

    def configure_model(self) -> None:
        reach("configure_model")

    def setup(self, stage: str) -> None:
        reach("setup")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx >= 2:
            reach("step")
        if IS_LONG and batch_idx >= 2:
            time.sleep(0.05)
        loss = super().training_step(batch, batch_idx)
        return FailsInBackward.apply(loss) if batch_idx >= 2 else loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.global_step >= 2:
            reach("optimizer")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        reach("validation")

    def on_train_batch_end(self, *args: Any) -> None:
        if self.trainer.global_step == 3 and CASE["stage"] in ("save", "on_save_checkpoint"):
            self.trainer.save_checkpoint(FOLDER / "checkpoint.ckpt")

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        reach("on_save_checkpoint")
        if CASE["stage"] == "save":
            checkpoint["mine"] = FailsWhenPickled()

    def teardown(self, stage: str) -> None:
        reach("teardown")


if __name__ == "__main__":
    torch.set_num_threads(1)
    loader = DataLoader(Samples(), 4, num_workers=int(CASE["stage"] == "loader"))
    trainer = quiet_trainer(
        strategy=CASE["strategy"],
        devices=int(CASE["ranks"]),
        max_epochs=1,
        num_sanity_val_steps=0,
        use_distributed_sampler=CASE["stage"] != "loader",
    )
    trainer.fit(Failing(), loader, DataLoader(Samples(), 4) if CASE["stage"] == "validation" else None)
