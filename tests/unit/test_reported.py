"""One rank of a node logs an error that several raise, and it does so before other processes are ended."""

import atexit
import os
import subprocess
import sys
from collections.abc import Callable

import pytest
from lightning.fabric.plugins.environments import LightningEnvironment
from torch.distributed import HashStore

from lightning_paral.distributed import process_group
from lightning_paral.distributed.launching import launcher
from lightning_paral.distributed.launching.launcher import CheckedSubprocessLauncher
from lightning_paral.distributed.process_group import is_first_to_report


class BrokenStore:
    def set_timeout(self, timeout: object) -> None:
        pass

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        raise RuntimeError("Connection reset by peer")


def test_same_error_is_logged_by_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_group, "_stores", {("localhost", 1, 0, 2): HashStore()})
    assert is_first_to_report("failed on rank 0 of 2")
    assert is_first_to_report("failed on rank 0 of 2")
    another = os.getpid() + 1
    monkeypatch.setattr(process_group.os, "getpid", lambda: another)
    assert not is_first_to_report("failed on rank 1 of 2")
    assert is_first_to_report("failed for another reason")


def test_every_rank_logs_its_error_if_the_store_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    for stores in ({}, {("localhost", 1, 0, 2): BrokenStore()}):
        monkeypatch.setattr(process_group, "_stores", stores)
        assert is_first_to_report("failed")
        assert is_first_to_report("failed")


def test_children_are_ended_without_lightnings_observer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "_GRACE_SECONDS", 0.0)
    at_exit: list[Callable[[], None]] = []
    monkeypatch.setattr(atexit, "register", at_exit.append)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    started = CheckedSubprocessLauncher(LightningEnvironment(), num_processes=2, num_nodes=1)
    started.start_others(lambda: started.procs.append(child))
    assert started.procs == []  # Lightning's observer kills this process as soon as a child in the list has failed
    assert started.describe_end(1) is None
    monkeypatch.setenv("LOCAL_RANK", "0")

    def fail() -> None:
        raise ValueError("the reason")

    with pytest.raises(ValueError, match="the reason"):
        started.launch(fail)
    for end in at_exit:
        end()
    assert child.wait(timeout=120) < 0  # killed by a signal
    assert started.describe_end(1) == "its process was killed by SIGTERM"
