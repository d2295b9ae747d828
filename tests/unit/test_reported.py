"""One rank of a node logs an error that several raise, and it does so before other processes are ended."""

import os

import pytest
from torch.distributed import HashStore

from lightning_paral.distributed import process_group
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
