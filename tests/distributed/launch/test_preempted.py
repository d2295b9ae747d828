"""Signals end a fit with one checkpoint, under each way to start it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from lightning_paral.checkpoint.integrity import verify
from tests.distributed.launch.test_launch import LAUNCHERS, ROOT

SECONDS = 120
LIMIT = 30
"""The number of batches of the fit."""


def start(folder: Path, log: str, command: list[str], **environment: str) -> "subprocess.Popen[str]":
    inherited = {name: value for name, value in os.environ.items() if name not in LAUNCHERS}
    with (folder / f"log-{log}").open("a") as file:
        return subprocess.Popen(
            command,
            cwd=ROOT,
            env=inherited | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)} | environment,
            stdout=file,
            stderr=subprocess.STDOUT,
            text=True,
        )


def script(folder: Path, strategy: str, callback: str) -> list[str]:
    return ["-m", "tests.distributed.launch.preempted_script", str(folder), strategy, callback]


def under_slurm(folder: Path, callback: str = "none", strategy: str = "paral_fsdp") -> "list[subprocess.Popen[str]]":
    """Start two ranks as srun does, with a fake `scontrol` that records its arguments."""
    tools = folder / "tools"
    tools.mkdir(exist_ok=True)
    (tools / "scontrol").write_text(f'#!/bin/sh\necho "$@" >> {folder}/scontrol-calls\n')
    (tools / "scontrol").chmod(0o755)
    variables = {
        "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_NNODES": "1",
        "SLURM_NODEID": "0",
        "SLURM_JOB_ID": str(10_000 + os.getpid() % 9_000),
        "SLURM_JOB_NAME": "train",
        "SLURM_NODELIST": "127.0.0.1",
        "PATH": f"{tools}:{os.environ['PATH']}",
    }
    command = [sys.executable, *script(folder, strategy, callback)]
    return [
        start(folder, str(rank), command, SLURM_PROCID=str(rank), SLURM_LOCALID=str(rank), **variables)
        for rank in range(2)
    ]


def num_batches(folder: Path, rank: int = 0) -> int:
    path = folder / f"losses-{rank}"
    return len(path.read_text().splitlines()) if path.exists() else 0


def wait_until_trained(folder: Path, batches: int, processes: "list[subprocess.Popen[str]]") -> None:
    deadline = time.monotonic() + SECONDS
    while num_batches(folder) < batches:
        assert time.monotonic() < deadline, "the run does not train"
        assert all(process.poll() is None for process in processes), logs(folder)
        time.sleep(0.02)


def statuses(folder: Path, processes: "list[subprocess.Popen[str]]") -> list[int]:
    try:
        return [process.wait(SECONDS) for process in processes]
    finally:
        for process in processes:
            process.kill()


def logs(folder: Path) -> str:
    return "\n".join(path.read_text()[-3000:] for path in sorted(folder.glob("log-*")))


def test_slurm_requeues_a_job_without_the_callback_and_the_next_job_resumes(tmp_path: Path) -> None:
    first = under_slurm(tmp_path)
    wait_until_trained(tmp_path, 13, first)  # in the second epoch
    for process in first:
        process.send_signal(signal.SIGUSR1)
    assert statuses(tmp_path, first) == [138, 138], logs(tmp_path)

    assert (tmp_path / "scontrol-calls").read_text() == f"requeue {10_000 + os.getpid() % 9_000}\n"
    assert verify(tmp_path / "hpc_ckpt_1.ckpt") == []
    stopped = num_batches(tmp_path)
    assert 13 <= stopped == num_batches(tmp_path, rank=1) < LIMIT

    assert statuses(tmp_path, under_slurm(tmp_path)) == [0, 0], logs(tmp_path)
    batches = [tuple(line.split()[:2]) for line in (tmp_path / "losses-0").read_text().splitlines()]
    assert batches == [(str(epoch), str(batch)) for epoch in range(3) for batch in range(10)]


def test_sigterm_under_slurm_saves_and_does_not_requeue(tmp_path: Path) -> None:
    processes = under_slurm(tmp_path, "signal", "paral_ddp")
    wait_until_trained(tmp_path, 3, processes)
    processes[1].send_signal(signal.SIGTERM)

    assert statuses(tmp_path, processes) == [143, 143], logs(tmp_path)
    assert verify(tmp_path / "hpc_ckpt_1.ckpt") == []
    assert not (tmp_path / "scontrol-calls").exists()


def test_sigterm_to_lightnings_launcher_ends_all_ranks(tmp_path: Path) -> None:
    launcher = start(tmp_path, "all", [sys.executable, *script(tmp_path, "paral_ddp", "signal")])
    wait_until_trained(tmp_path, 3, [launcher])
    launcher.send_signal(signal.SIGTERM)

    assert statuses(tmp_path, [launcher]) == [143], logs(tmp_path)
    assert num_batches(tmp_path) == num_batches(tmp_path, rank=1) < LIMIT
    saved = list(tmp_path.glob("preempted-*.ckpt"))
    assert len(saved) == 1
    assert verify(saved[0]) == []


def test_sigterm_ends_a_run_that_hangs_without_the_callback(tmp_path: Path) -> None:
    launcher = start(tmp_path, "all", [sys.executable, *script(tmp_path, "paral_ddp", "hang")])
    wait_until_trained(tmp_path, 4, [launcher])
    launcher.send_signal(signal.SIGTERM)

    assert statuses(tmp_path, [launcher]) == [1], logs(tmp_path)
    last = logs(tmp_path).splitlines()[-1]
    assert "The job received SIGTERM, but no batch ended for 20 s. Rank 1 has been in `training_step` (" in last
    assert "; rank 0 has waited" in last


def test_sigterm_to_torchrun_saves_and_the_fit_may_return(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    agent = start(tmp_path, "all", [*command, *script(tmp_path, "paral_ddp", "return")])
    wait_until_trained(tmp_path, 3, [agent])
    agent.send_signal(signal.SIGTERM)

    statuses(tmp_path, [agent])  # torchrun's own, after a signal
    assert num_batches(tmp_path) == num_batches(tmp_path, rank=1) < LIMIT
    assert [verify(path) for path in tmp_path.glob("preempted-*.ckpt")] == [[]]
    assert sum("returned: True, True" in line for line in logs(tmp_path).splitlines()) == 2, logs(tmp_path)
