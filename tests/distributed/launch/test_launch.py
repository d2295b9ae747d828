"""Launch real processes with Lightning's launcher, torchrun, SLURM's environment and two nodes; make ranks fail."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.network import joined_nodes, why_no_nodes

ROOT = Path(__file__).parents[3]
SECONDS = 300
SLEEPING = ("rank_one_sleeps", "rank_one_sleeps_in_ring")
LAUNCHERS = ("MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK", "WORLD_SIZE", "NODE_RANK", "TORCHELASTIC_RUN_ID")


def start(arguments: list[str], **environment: str) -> "subprocess.Popen[str]":
    """Start a process without the variables of a launcher in its environment, and capture its output."""
    inherited = {name: value for name, value in os.environ.items() if name not in LAUNCHERS}
    return subprocess.Popen(
        arguments,
        cwd=ROOT,
        env=inherited | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def script(scenario: str, folder: Path) -> list[str]:
    return ["-m", "tests.distributed.launch.launched", scenario, str(folder)]


def outputs(*processes: "subprocess.Popen[str]") -> list[str]:
    """Wait for all processes, kill those that take too long, and return the output of each."""
    deadline = time.monotonic() + SECONDS
    try:
        return [process.communicate(timeout=max(1.0, deadline - time.monotonic()))[0] for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()


def check_two_fits(folder: Path) -> None:
    """Assert that both ranks fitted twice, in a new process group each time, and have the same weights."""
    reports = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in (0, 1)]
    for rank, report in enumerate(reports):
        first, second = report["fits"]
        for seen in (first, second):
            assert (seen["rank"], seen["world_size"], seen["sum_after"]) == (rank, 2, 2.0)
            assert seen["backend"] == "gloo"
        assert report["payload_bytes"] > 0  # of the ring
    for fit in (0, 1):
        assert reports[0]["fits"][fit]["weight"] == reports[1]["fits"][fit]["weight"]


def test_lightnings_own_launcher(tmp_path: Path) -> None:
    process = start([sys.executable, *script("two_fits", tmp_path)])

    (printed,) = outputs(process)

    assert process.returncode == 0, printed
    check_two_fits(tmp_path)


def test_torchrun(tmp_path: Path) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    process = start([*launcher, *script("two_fits", tmp_path)])

    (printed,) = outputs(process)

    assert process.returncode == 0, printed
    check_two_fits(tmp_path)


def test_slurm(tmp_path: Path) -> None:
    common = {"SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2", "SLURM_NNODES": "1", "SLURM_NODEID": "0"}
    common |= {
        "SLURM_JOB_ID": str(10_000 + os.getpid() % 9_000),
        "SLURM_JOB_NAME": "train",
        "SLURM_NODELIST": "127.0.0.1",
    }
    tasks = [
        start([sys.executable, *script("two_fits", tmp_path)], SLURM_PROCID=rank, SLURM_LOCALID=rank, **common)
        for rank in ("0", "1")
    ]

    printed = outputs(*tasks)

    assert [task.returncode for task in tasks] == [0, 0], "\n".join(printed)
    check_two_fits(tmp_path)


def test_two_nodes(tmp_path: Path) -> None:
    reason = why_no_nodes()
    if reason:
        pytest.skip(reason)
    with joined_nodes(2) as nodes:
        environment = {"MASTER_ADDR": nodes.addresses[0], "MASTER_PORT": "29533", "TEST_NUM_NODES": "2"}
        environment |= {"GLOO_SOCKET_IFNAME": "eth0"}
        processes = [
            start(
                nodes.command_on(node, [sys.executable, *script("two_fits", tmp_path)]),
                NODE_RANK=str(node),
                TEST_NODE_RANK=str(node),
                **environment,
            )
            for node in (0, 1)
        ]
        printed = outputs(*processes)

    assert [process.returncode for process in processes] == [0, 0], "\n".join(printed)
    check_two_fits(tmp_path)


def test_port_in_use_is_named_before_any_process_starts(tmp_path: Path) -> None:
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        process = start([sys.executable, *script("two_fits", tmp_path)], MASTER_PORT=str(port))

        (printed,) = outputs(process)

    assert process.returncode == 1
    assert f"ConfigurationError: Cannot listen on MASTER_PORT={port}" in printed
    assert printed.count("Traceback") == 1


def test_failure_of_one_rank_ends_all_and_prints_its_error(tmp_path: Path) -> None:
    process = start([sys.executable, *script("rank_one_fails", tmp_path)])

    (printed,) = outputs(process)  # ends only when every process that holds the pipe has ended

    assert process.returncode != 0
    assert "ValueError: the reason why rank 1 failed" in printed


@pytest.fixture(scope="module")
def sleeping(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, "subprocess.Popen[str]"]]:
    """Runs that wait for their timeout, by scenario. They wait at the same time."""
    folder = tmp_path_factory.mktemp("sleeping")
    runs = {scenario: start([sys.executable, *script(scenario, folder)]) for scenario in SLEEPING}
    yield runs
    for run in runs.values():
        run.kill()
        run.wait(timeout=60)


@pytest.mark.parametrize("scenario", SLEEPING)
def test_timeout_is_named_when_it_passes(sleeping: dict[str, "subprocess.Popen[str]"], scenario: str) -> None:
    (printed,) = outputs(sleeping[scenario])

    assert sleeping[scenario].returncode != 0
    assert "did not finish within timeout=0:00:12, set by `ParalDDPStrategy(timeout=...)`" in printed


def test_missing_ranks_are_named_with_the_timeout(tmp_path: Path) -> None:
    environment = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29534",
    }
    process = start([sys.executable, *script("nobody_else_comes", tmp_path)], **environment)

    (printed,) = outputs(process)

    assert process.returncode == 1
    assert "ProcessGroupError: Rank 0 of 2 could not join the others at MASTER_ADDR=127.0.0.1" in printed
    assert "rank 1 of 2 has not joined" in printed
    assert "timeout=0:00:03" in printed
