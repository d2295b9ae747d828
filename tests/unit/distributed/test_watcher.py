"""Signals that a watcher hears, and signals that are handled during a run only."""

import os
import signal
import time
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from lightning_paral.distributed.watcher import RankWatcher, SignalHandler, handler_of


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


def test_signal_is_handled_until_the_handler_before_comes_back_even_if_it_is_set_again(received: list[int]) -> None:
    before, calls = signal.getsignal(signal.SIGTERM), []
    handler = SignalHandler(signal.SIGTERM, lambda *_: calls.append(1))
    signal.raise_signal(signal.SIGTERM)
    assert (calls, received) == ([1], [])
    handler.restore()
    assert signal.getsignal(signal.SIGTERM) is before
    signal.signal(signal.SIGTERM, handler)
    assert handler_of(signal.SIGTERM) is before
    signal.raise_signal(signal.SIGTERM)
    assert (calls, received) == ([1], [signal.SIGTERM])


def test_signals_of_a_forked_process_are_not_heard(watcher: RankWatcher, received: list[int]) -> None:
    before = signal.set_wakeup_fd(-1)
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
    watcher.end()
    assert signal.set_wakeup_fd(before) == -1


def test_watcher_ends_after_another_that_began_before_it(watcher: RankWatcher) -> None:
    before = signal.set_wakeup_fd(-1)
    watcher.hear(signal.SIGTERM, bool)
    last = RankWatcher("last", patience=60.0, poll_seconds=0.01)
    last.hear(signal.SIGTERM, bool)
    watcher.end()
    last.end()
    assert signal.set_wakeup_fd(before) == -1
