"""Commands whose output nothing reads any more."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from tests.command import run_paral


@contextmanager
def stdout_without_reader(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make stdout a pipe whose reader has closed it. No fixture: pytest sets stdout again before it calls the test."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stdout, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", stdout)
        yield


def test_inspect_into_head_ends_without_a_traceback(tmp_path: Path) -> None:
    path = tmp_path / "many.ckpt"
    torch.save({"state_dict": {f"layer{index}.weight": torch.zeros(1) for index in range(5000)}}, path)
    command = f"{sys.executable} -m lightning_paral inspect {path} | head -n 1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=300)
    assert done.stdout.startswith("form")
    assert done.stderr == ""
    assert done.returncode == 141


@pytest.mark.parametrize("arguments", ["strategies", "--help", "inspect --help", "fit --help"])
def test_short_output_that_nothing_reads_is_no_error(monkeypatch, arguments: str) -> None:
    with stdout_without_reader(monkeypatch):
        assert run_paral(*arguments.split()) in (None, 0)


def test_message_of_an_error_is_kept(monkeypatch) -> None:
    with stdout_without_reader(monkeypatch):
        assert "There is no checkpoint" in run_paral("verify", "nowhere")


def test_broken_network_connection_is_not_hidden(monkeypatch) -> None:
    def fail(command: str) -> None:
        raise BrokenPipeError("connection")

    monkeypatch.setattr("lightning_paral.cli._run", fail)
    with pytest.raises(BrokenPipeError, match="connection"):
        run_paral("verify", "remote")
