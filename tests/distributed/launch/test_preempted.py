"""Signals end a fit with one checkpoint, under each way to start it."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from lightning_paral.checkpoint.load import verify
from tests.launching import TORCHRUN, Process

SECONDS = 120
LIMIT = 30
"""The number of batches of the fit."""


def slurm_variables() -> dict[str, str]:
    common = {"SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2", "SLURM_NNODES": "1", "SLURM_NODEID": "0"}
    job = str(10_000 + os.getpid() % 9_000)
    return common | {"SLURM_JOB_ID": job, "SLURM_JOB_NAME": "train", "SLURM_NODELIST": "127.0.0.1"}


@pytest.fixture
def run(launch, tmp_path: Path) -> Any:
    """A function that starts the script, whose output goes to the file `log-LOG`."""

    def run(strategy: str, callback: str, log: str = "all", **options: Any) -> Process:
        with (tmp_path / f"log-{log}").open("a") as file:
            arguments = ("-m", "tests.distributed.launch.preempted_script", str(tmp_path), strategy, callback)
            process: Process = launch(*arguments, output=file, **options)
            return process

    return run


@pytest.fixture
def under_slurm(run, tmp_path: Path) -> Any:
    """A function that starts two ranks as srun does, with a fake `scontrol` that records its arguments."""
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "scontrol").write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/scontrol-calls\n')
    (tools / "scontrol").chmod(0o755)
    variables = slurm_variables() | {"PATH": f"{tools}:{os.environ['PATH']}"}

    def start(strategy: str, callback: str) -> list[Process]:
        return [run(strategy, callback, rank, SLURM_PROCID=rank, SLURM_LOCALID=rank, **variables) for rank in "01"]

    return start


def num_batches(folder: Path, rank: int = 0) -> int:
    path = folder / f"losses-{rank}"
    return len(path.read_text().splitlines()) if path.exists() else 0


def wait_until_trained(folder: Path, batches: int, processes: list[Process]) -> None:
    deadline = time.monotonic() + SECONDS
    while num_batches(folder) < batches:
        assert time.monotonic() < deadline, "the run does not train"
        assert all(process.poll() is None for process in processes), logs(folder)
        time.sleep(0.02)


def statuses(processes: list[Process]) -> list[int]:
    return [process.wait(SECONDS) for process in processes]


def logs(folder: Path) -> str:
    return "\n".join(path.read_text()[-3000:] for path in sorted(folder.glob("log-*")))


def test_slurm_requeues_a_job_without_the_callback_and_the_next_job_resumes(under_slurm, tmp_path: Path) -> None:
    first = under_slurm("paral_fsdp", "none")
    wait_until_trained(tmp_path, 13, first)  # in the second epoch
    for process in first:
        process.send_signal(signal.SIGUSR1)
    assert statuses(first) == [138, 138], logs(tmp_path)

    assert (tmp_path / "scontrol-calls").read_text() == f"requeue {slurm_variables()['SLURM_JOB_ID']}\n"
    assert verify(tmp_path / "hpc_ckpt_1.ckpt") == []
    stopped = num_batches(tmp_path)
    assert 13 <= stopped == num_batches(tmp_path, rank=1) < LIMIT

    assert statuses(under_slurm("paral_fsdp", "none")) == [0, 0], logs(tmp_path)
    batches = [tuple(line.split()[:2]) for line in (tmp_path / "losses-0").read_text().splitlines()]
    assert batches == [(str(epoch), str(batch)) for epoch in range(3) for batch in range(10)]


def test_sigterm_under_slurm_saves_and_does_not_requeue(under_slurm, tmp_path: Path) -> None:
    processes = under_slurm("paral_ddp", "signal")
    wait_until_trained(tmp_path, 3, processes)
    processes[1].send_signal(signal.SIGTERM)

    assert statuses(processes) == [143, 143], logs(tmp_path)
    assert verify(tmp_path / "hpc_ckpt_1.ckpt") == []
    assert not (tmp_path / "scontrol-calls").exists()


@pytest.mark.parametrize(("callback", "status"), [("signal", 143), ("zero", 0)])
def test_sigterm_to_lightnings_launcher_ends_all_ranks(run, tmp_path: Path, callback: str, status: int) -> None:
    launcher = run("paral_ddp", callback)
    wait_until_trained(tmp_path, 3, [launcher])
    launcher.send_signal(signal.SIGTERM)

    assert statuses([launcher]) == [status], logs(tmp_path)
    assert num_batches(tmp_path) == num_batches(tmp_path, rank=1) < LIMIT
    saved = list(tmp_path.glob("preempted-*.ckpt"))
    assert len(saved) == 1
    assert verify(saved[0]) == []


def test_sigterm_to_torchrun_saves_and_the_fit_may_return(run, tmp_path: Path) -> None:
    agent = run("paral_ddp", "return", by=TORCHRUN)
    wait_until_trained(tmp_path, 3, [agent])
    agent.send_signal(signal.SIGTERM)

    statuses([agent])  # torchrun's own, after a signal
    assert num_batches(tmp_path) == num_batches(tmp_path, rank=1) < LIMIT
    assert [verify(path) for path in tmp_path.glob("preempted-*.ckpt")] == [[]]
    assert sum("returned: True" in line for line in logs(tmp_path).splitlines()) == 2, logs(tmp_path)
