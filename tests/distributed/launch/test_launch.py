"""Launch real processes with Lightning's launcher, torchrun, SLURM's environment and two nodes; make ranks fail."""

import json
import os
import socket
from pathlib import Path

import pytest

from tests.launching import TORCHRUN, Process, free_port, outputs


def script(scenario: str, folder: Path) -> list[str]:
    return ["-m", "tests.distributed.launch.launched", scenario, str(folder)]


def slurm_variables() -> dict[str, str]:
    common = {"SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2", "SLURM_NNODES": "1", "SLURM_NODEID": "0"}
    job = str(10_000 + os.getpid() % 9_000)
    return common | {"SLURM_JOB_ID": job, "SLURM_JOB_NAME": "train", "SLURM_NODELIST": "127.0.0.1"}


def check_two_fits(folder: Path, *processes: Process) -> None:
    """Assert that both ranks fitted twice, in a new process group each time, and have the same weights."""
    printed = outputs(*processes)
    assert not any(process.returncode for process in processes), "\n".join(printed)
    reports = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in (0, 1)]
    for rank, report in enumerate(reports):
        first, second = report["fits"]
        for seen in (first, second):
            assert (seen["rank"], seen["world_size"], seen["sum_after"]) == (rank, 2, 2.0)
            assert seen["backend"] == "gloo"
        assert report["payload_bytes"] > 0  # of the ring
    for fit in (0, 1):
        assert reports[0]["fits"][fit]["weight"] == reports[1]["fits"][fit]["weight"]


@pytest.mark.lane("default")
def test_lightnings_own_launcher(launch, tmp_path: Path) -> None:
    check_two_fits(tmp_path, launch(*script("two_fits", tmp_path)))


@pytest.mark.lane("default")
def test_torchrun(launch, tmp_path: Path) -> None:
    check_two_fits(tmp_path, launch(*script("two_fits", tmp_path), by=TORCHRUN))


def test_port_in_use_is_named_before_any_process_starts(launch, tmp_path: Path) -> None:
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        process = launch(*script("two_fits", tmp_path), MASTER_PORT=str(port))
        (printed,) = outputs(process)

    assert process.returncode == 1
    assert f"ConfigurationError: Cannot listen on MASTER_PORT={port}" in printed
    assert printed.count("Traceback") == 1


@pytest.mark.lane("default")
def test_failure_of_one_rank_ends_all_and_prints_its_error(launch, tmp_path: Path) -> None:
    process = launch(*script("rank_one_fails", tmp_path))

    (printed,) = outputs(process)  # ends only when every process that holds the pipe has ended

    assert process.returncode != 0
    assert "ValueError: the reason why rank 1 failed" in printed


def test_missing_ranks_are_named_with_the_timeout(launch, tmp_path: Path) -> None:
    environment = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    process = launch(*script("nobody_else_comes", tmp_path), MASTER_PORT=str(free_port()), **environment)

    (printed,) = outputs(process)

    assert process.returncode == 1
    assert "ProcessGroupError: Rank 0 of 2 could not join the others at MASTER_ADDR=127.0.0.1" in printed
    assert "rank 1 of 2 has not joined" in printed
    assert "timeout=0:00:03" in printed
