"""Launch real processes with Lightning's launcher and torchrun."""

import json
import socket
import sys
from pathlib import Path

import pytest

from tests.launching import TORCHRUN, free_port, outputs


def script(scenario: str, folder: Path) -> list[str]:
    return ["-m", "tests.distributed.launch.launched", scenario, str(folder)]


@pytest.mark.lane("default")
@pytest.mark.parametrize("by", [(sys.executable,), TORCHRUN], ids=["python", "torchrun"])
def test_both_ranks_fit_twice_and_have_the_same_weights(launch, tmp_path: Path, by: tuple[str, ...]) -> None:
    process = launch(*script("two_fits", tmp_path), by=by)

    (printed,) = outputs(process)

    assert process.returncode == 0, printed
    reports = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in (0, 1)]
    for rank, report in enumerate(reports):
        for seen in report["fits"]:
            assert (seen["rank"], seen["world_size"], seen["sum_after"], seen["backend"]) == (rank, 2, 2.0, "gloo")
        assert report["payload_bytes"] > 0  # of the ring
    for first, second in zip(reports[0]["fits"], reports[1]["fits"], strict=True):
        assert first["weight"] == second["weight"]


def test_port_in_use_is_named_before_any_process_starts(launch, tmp_path: Path) -> None:
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        process = launch(*script("two_fits", tmp_path), MASTER_PORT=str(port))
        (printed,) = outputs(process)

    assert process.returncode == 1
    assert f"ConfigurationError: Cannot listen on MASTER_PORT={port}" in printed
    assert printed.count("Traceback") == 1


def test_missing_ranks_are_named_with_the_timeout(launch, tmp_path: Path) -> None:
    environment = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    process = launch(*script("nobody_else_comes", tmp_path), MASTER_PORT=str(free_port()), **environment)

    (printed,) = outputs(process)

    assert process.returncode == 1
    assert "ProcessGroupError: Rank 0 of 2 could not join the others at MASTER_ADDR=127.0.0.1" in printed
    assert "rank 1 of 2 has not joined" in printed
    assert "timeout=0:00:03" in printed
