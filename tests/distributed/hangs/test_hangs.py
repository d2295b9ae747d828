"""A hang ends at the timeout, which is named, and before it all ranks say where they are."""

import os
import signal
import time
from pathlib import Path

import pytest
from torch import Tensor

from lightning_paral import Preemption
from tests.distributed.hangs.sleeping import Logged, Sleeper, fit_with_own_group

SECONDS = 5.0
STRATEGIES = (
    "paral_ddp",
    "paral_ddp_ring",
    "paral_fsdp",
    "paral_zero2",
    "paral_zero3",
)
STAGES = ("configure_model", "training_step", "validation_step", "on_save_checkpoint")


def hang(label: str, stage: str, sleeper: int, folder: str) -> tuple[list[str], str]:
    """Let a rank sleep until the other one has given up. Return what this rank logged, and its error."""
    awake, logged = Path(folder, "awake"), Logged()
    error = fit_with_own_group(label, Sleeper(stage, sleeper, awake), logged, folder, SECONDS)
    awake.touch()
    return logged.messages, error


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("label", STRATEGIES)
def test_hang_ends_at_the_timeout_and_names_the_rank_that_sleeps(in_own_world, tmp_path, label, stage) -> None:
    sleeper = 0 if stage == "on_save_checkpoint" else 1
    waiting = 1 - sleeper
    told = in_own_world(2, hang, label, stage, sleeper, str(tmp_path), timeout=90.0)

    assert "did not finish within timeout=0:00:05, set by `Paral" in told[waiting][1]
    printed = "\n".join(told[0][0] + told[1][0])
    assert printed.count(f"Rank {waiting} has waited for") == 1
    assert f"Rank {sleeper} has been in `sleep_at` (sleeping.py:" in printed
    assert f"called by `{stage}` (sleeping.py:" in printed
    assert f"; rank {waiting} has waited " in printed


def ask_by_signal(folder: str) -> tuple[list[str], str]:
    """Let rank 1 sleep until the summary is logged, and send SIGUSR2 to rank 0, which waits in a collective."""
    awake, process = Path(folder, "awake"), Path(folder, "process")
    logged = Logged("SIGUSR2 reached rank 0.", awake)
    model = Asking(process, awake)
    return logged.messages, fit_with_own_group("paral_ddp", model, logged, folder, 60.0)


class Asking(Sleeper):
    """Rank 1 sends SIGUSR2 to rank 0 two seconds before it sleeps."""

    def __init__(self, process: Path, awake: Path) -> None:
        super().__init__("training_step", 1, awake)
        self.process = process

    def on_train_start(self) -> None:
        if self.global_rank == 0:
            self.process.write_text(str(os.getpid()))

    def sleep_at(self, stage: str) -> None:
        if stage == self.stage and self.global_rank == 1:
            time.sleep(2.0)
            os.kill(int(self.process.read_text()), signal.SIGUSR2)
        super().sleep_at(stage)


def test_signal_shows_where_all_ranks_are_and_the_run_continues(in_own_world, tmp_path) -> None:
    told = in_own_world(2, ask_by_signal, str(tmp_path), timeout=90.0)

    assert [error for _, error in told] == ["", ""]
    stack, summary = told[0][0]
    assert "Rank 0 of 2 (process" in stack
    assert "has waited" in stack
    assert "in the backward pass (Lightning's `backward`, called at sleeping.py:" in stack
    assert "trainer.fit(model, regression_data(num_batches, 2), regression_data(2, 2))\n  ... " in stack
    assert summary.startswith("SIGUSR2 reached rank 0. Rank 1 has been in `sleep_at` (")
    assert "; rank 0 has waited" in summary
    (stack,) = told[1][0]
    assert "time.sleep(0.1)" in stack


def terminate(folder: str, label: str, callbacks: list[Preemption], hangs: bool) -> tuple[str, int]:
    """Send SIGTERM to rank 0, from rank 1 in batch 1, and return the error and the number of steps of this rank."""
    logged, model = Logged(), Terminating(Path(folder), hangs)
    error = fit_with_own_group(label, model, logged, folder, 60.0, *callbacks, num_batches=20_000)
    return error, model.num_steps


class Terminating(Sleeper):
    """Rank 1 sends SIGTERM to rank 0, which waits for it, and then sleeps if `hangs`."""

    def __init__(self, folder: Path, hangs: bool) -> None:
        super().__init__("training_step" if hangs else "", 1, folder / "awake")
        self.process, self.num_steps = folder / "process", 0

    def on_train_start(self) -> None:
        if self.global_rank == 0:
            self.process.write_text(str(os.getpid()))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if batch_idx == 1 and self.global_rank == 1:
            os.kill(int(self.process.read_text()), signal.SIGTERM)
        loss = super().training_step(batch, batch_idx)
        self.num_steps += 1
        return loss


def test_sigterm_ends_a_run_that_hangs_and_names_where_the_ranks_are(in_own_world, tmp_path) -> None:
    arguments = (str(tmp_path), "paral_fsdp", [Preemption(grace=1.0)], True)
    told = in_own_world(2, terminate, *arguments, timeout=90.0)

    for error, num_steps in told:
        assert "The job received SIGTERM, but no batch ended for 1 s. Rank 1 has been in `sleep_at` (" in error
        assert "; rank 0 has waited " in error
        assert "of the root FSDP unit (" in error
        assert num_steps <= 2


def test_sigterm_stops_all_ranks_after_the_same_step_without_a_callback(in_own_world, tmp_path) -> None:
    told = in_own_world(2, terminate, str(tmp_path), "paral_fsdp", [], False, timeout=90.0)

    assert told[0] == told[1]
    assert told[0][0] == "SIGTERMException"
