"""Signals that a watcher hears, and signals that are ignored while a run ends."""

import os
import signal
import time
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from lightning_paral.distributed.watcher import Ignored, RankWatcher


@pytest.fixture
def received() -> Iterator[list[int]]:
    """Signals that the handler of SIGTERM before the test has received."""
    received: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda signum, frame: received.append(signum))
    yield received
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def watcher() -> Iterator[RankWatcher]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    watcher = RankWatcher("run", patience=60.0, poll_seconds=0.01)
    yield watcher
    watcher.end()
    dist.destroy_process_group()


def wait_for(heard: list[int]) -> None:
    deadline = time.monotonic() + 30.0
    while not heard:
        assert time.monotonic() < deadline, "the signal was not heard"
        time.sleep(0.01)


def test_signal_is_ignored_and_the_handler_comes_back(received: list[int]) -> None:
    ignored = Ignored(signal.SIGTERM)
    signal.raise_signal(signal.SIGTERM)
    assert received == []
    ignored.restore()
    signal.raise_signal(signal.SIGTERM)
    assert received == [signal.SIGTERM]


def test_ignored_signal_is_handled_as_before_if_its_handler_is_set_again(received: list[int]) -> None:
    ignored = Ignored(signal.SIGTERM)
    ignored.restore()
    signal.signal(signal.SIGTERM, ignored)
    signal.raise_signal(signal.SIGTERM)
    assert received == [signal.SIGTERM]


def test_watcher_and_who_listened_before_both_hear_a_signal(watcher: RankWatcher, received: list[int]) -> None:
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    before = signal.set_wakeup_fd(write_end)
    try:
        heard: list[int] = []
        watcher.hear(signal.SIGTERM, lambda: heard.append(1))
        signal.raise_signal(signal.SIGTERM)
        wait_for(heard)
        assert os.read(read_end, 8) == bytes([signal.SIGTERM])
        watcher.end()
    finally:
        assert signal.set_wakeup_fd(before) == write_end
        os.close(read_end)
        os.close(write_end)


def test_signals_of_a_forked_process_are_not_heard(watcher: RankWatcher, received: list[int]) -> None:
    heard: list[int] = []
    watcher.hear(signal.SIGTERM, lambda: heard.append(1))
    child = os.fork()
    if child == 0:
        signal.raise_signal(signal.SIGTERM)
        os._exit(0)
    os.waitpid(child, 0)
    time.sleep(0.1)
    assert heard == []
    signal.raise_signal(signal.SIGTERM)
    wait_for(heard)
