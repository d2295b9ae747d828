"""Commands whose output nothing reads any more."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from lightning_paral.cli.closed_stdout import exiting_if_stdout_is_closed
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
    assert done.stdout.count("\n") == 1
    assert done.stderr == ""
    assert done.returncode == 141


@pytest.mark.parametrize(
    ("arguments", "status"),
    [("strategies", 141), ("--help", 141), ("--version", 141), ("inspect --help", 0), ("fit --help", 0)],
)
def test_output_that_nothing_reads(monkeypatch, arguments: str, status: int) -> None:
    with stdout_without_reader(monkeypatch):
        ended = run_paral(*arguments.split())
    assert ended == status


def test_message_and_status_of_an_error_are_kept(monkeypatch) -> None:
    def fail() -> None:
        with exiting_if_stdout_is_closed():
            print("before the error")
            sys.exit("the error")

    with stdout_without_reader(monkeypatch), pytest.raises(SystemExit) as ended:
        fail()
    assert ended.value.code == "the error"


def test_broken_network_connection_is_not_hidden(monkeypatch) -> None:
    reader, writer = os.pipe()
    with os.fdopen(reader), os.fdopen(writer, "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        with pytest.raises(BrokenPipeError, match="connection"), exiting_if_stdout_is_closed():
            raise BrokenPipeError("connection")
