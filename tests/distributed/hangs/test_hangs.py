"""A hang ends at the timeout, which is named, and every rank says where it is; on SIGUSR2 the run continues."""

import os
import re
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
from torch import Tensor

from lightning_paral.callbacks import preemption
from tests.distributed.hangs import mismatched
from tests.distributed.hangs.sleeping import Logged, Sleeper, fit_with_own_group
from tests.launching import TORCHRUN, outputs

SECONDS = 3.0
SECONDS_AT_MOST = 200.0


def hang(label: str, stage: str, sleeper: int, folder: str) -> tuple[list[str], str]:
    """Let a rank sleep until the other one has given up. Return what this rank logged, and its error."""
    awake, logged = Path(folder, "awake"), Logged()
    error = fit_with_own_group(label, [Sleeper(stage, sleeper, awake)], logged, folder, SECONDS)
    awake.touch()
    return logged.messages, error


@pytest.mark.parametrize(
    ("label", "stage"),
    [
        ("paral_ddp", "loader"),
        ("paral_ddp_ring", "training_step"),
        ("paral_fsdp", "validation_step"),
        ("paral_zero2", "on_save_checkpoint"),
        ("paral_zero3", "configure_model"),
    ],
)
def test_hang_ends_at_the_timeout_and_names_the_rank_that_sleeps(in_own_world, tmp_path, label, stage) -> None:
    sleeper = 0 if stage == "on_save_checkpoint" else 1
    waiting = 1 - sleeper
    told = in_own_world(2, hang, label, stage, sleeper, str(tmp_path), timeout=90.0)

    error = told[waiting][1]
    line = r"`sleep_until` \(sleeping.py:\d+\)"
    if stage == "loader":
        line = r"`fit_with_own_group` \(sleeping.py:\d+\), in `_try_get_data` \(torch/utils/data/dataloader.py:\d+\)"
    assert "did not finish within timeout=0:00:03, set by `Paral" in error
    where = rf"Rank {sleeper} is in {line}; rank {waiting} is in "
    assert re.search(rf"A collective of rank {waiting} timed out. {where}", error)
    logged = "\n".join(told[sleeper][0])
    assert f"Rank {sleeper} of 2 (process " in logged
    assert " in fit_with_own_group\n" in logged  # its whole stack
    assert any(error.endswith(message) for message in told[waiting][0])


def ask_by_signal(folder: str) -> tuple[list[str], str]:
    """Let rank 1 sleep until the summary is logged, and send SIGUSR2 to rank 0, which waits in a collective."""
    awake, process = Path(folder, "awake"), Path(folder, "process")
    logged = Logged("SIGUSR2 reached rank 0.", awake)
    models = [Sleeper("", 1, awake), Asking(process, awake)]
    return logged.messages, fit_with_own_group("paral_ddp", models, logged, folder, 60.0)


class Asking(Sleeper):
    """Rank 1 sends SIGUSR2 to rank 0 a second before it sleeps."""

    def __init__(self, process: Path, awake: Path) -> None:
        super().__init__("training_step", 1, awake)
        self.process = process

    def on_train_start(self) -> None:
        if self.global_rank == 0:
            self.process.write_text(str(os.getpid()))

    def sleep_at(self, stage: str) -> None:
        if stage == self.stage and self.global_rank == 1:
            time.sleep(1.0)
            os.kill(int(self.process.read_text()), signal.SIGUSR2)
        super().sleep_at(stage)


def test_signal_in_a_later_run_shows_where_all_ranks_are_and_the_run_continues(in_own_world, tmp_path) -> None:
    told = in_own_world(2, ask_by_signal, str(tmp_path), timeout=90.0)

    assert [error for _, error in told] == ["", ""]
    stacks, summary = told[0][0]
    assert "Rank 0 of 2 (process" in stacks
    assert " in training_step\n" not in stacks  # it is in the backward pass
    waits = r"`fit_with_own_group` \(sleeping.py:\d+\), in `_engine_run_backward` \(torch/autograd/graph.py:\d+\)"
    where = rf"Rank 1 is in `sleep_until` \(sleeping.py:\d+\); rank 0 is in {waits}."
    assert re.fullmatch(rf"SIGUSR2 reached rank 0. {where}", summary)
    (stacks,) = told[1][0]
    assert " in training_step\n" in stacks


def terminate(folder: str, hangs: bool) -> tuple[str, int, list[str]]:
    """Send SIGTERM to rank 0, from rank 1 in batch 1; return the error, the number of steps, and what was logged."""
    logged, model = Logged("the fit has not stopped", Path(folder, "awake")), Terminating(Path(folder), hangs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preemption, "_HUNG_SECONDS", 1.0)
        error = fit_with_own_group("paral_fsdp", [model], logged, folder, 60.0, num_batches=20_000)
    return error, model.num_steps, logged.messages


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


@pytest.mark.parametrize("hangs", [False, True])
def test_sigterm_stops_all_ranks_after_the_same_step_and_names_those_that_hang(in_own_world, tmp_path, hangs) -> None:
    told = in_own_world(2, terminate, str(tmp_path), hangs, timeout=90.0)

    assert told[0][:2] == told[1][:2]
    assert told[0][0] == "SIGTERMException"
    text = "\n".join(told[0][2] + told[1][2])
    where = r"Rank 1 is in `sleep_until` \(.*; rank 0 is in `fit_with_own_group` \(sleeping.py:"
    assert bool(re.search(f"SIGTERM, but the fit has not stopped for 1 s. {where}", text)) == hangs


@pytest.mark.parametrize(
    "by", [(sys.executable,), pytest.param(TORCHRUN, marks=pytest.mark.lane("all"))], ids=["python", "torchrun"]
)
@pytest.mark.parametrize(("strategy", "function"), [("paral_fsdp", "training_step"), ("paral_zero3", "forward")])
def test_ranks_that_run_other_units_end_with_the_lines_in_which_they_wait(launch, strategy, function, by) -> None:
    process = launch("-m", mismatched.__name__, strategy, by=by)

    (printed,) = outputs(process)

    assert process.returncode != 0, printed
    assert "gloo::EnforceNotMet" in printed
    assert re.search(rf'mismatched.py", line \d+ in {function}', printed), printed
    assert re.search(r"Rank \d ended because rank \d died", printed), printed


def test_other_ranks_end_although_rank_0_is_stopped_and_its_store_does_not_answer(launch, tmp_path: Path) -> None:
    process = launch("-m", "tests.distributed.hangs.stopped", str(tmp_path))
    timer, printed = threading.Timer(SECONDS_AT_MOST, process.kill), ""
    timer.start()
    while "Rank 1 ends: the process that serves the store" not in printed:
        line = process.stdout.readline()
        assert line, printed
        printed += line
    timer.cancel()
    process.send_signal(signal.SIGCONT)
    outputs(process)  # ends only when every process that holds the pipe has ended

    assert process.returncode != 0
    assert "set by `ParalDDPStrategy(timeout=...)`" in printed
