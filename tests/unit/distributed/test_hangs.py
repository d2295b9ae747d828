"""The sentence that says where all ranks are, and what one process can show of asking for it."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest
import torch.distributed as dist

from lightning_paral.distributed import hangs
from lightning_paral.distributed.hangs import Hangs, Place, summarize
from lightning_paral.distributed.watcher import RankWatcher

STEP = Place("`training_step` (train.py:41)", waits=False)
REDUCE = Place("`on_step` (train.py:44), in `all_reduce` (torch/distributed/distributed_c10d.py:3173)", waits=True)
GATHER = Place("`on_step` (train.py:46), in `all_gather` (torch/distributed/distributed_c10d.py:4287)", waits=True)


def test_ranks_that_others_wait_for_come_first_and_equal_places_are_one_group() -> None:
    places = {0: REDUCE, 1: STEP, 2: REDUCE, 3: REDUCE, 5: GATHER}

    assert summarize(places, world_size=7, if_all_wait="Differ.") == (
        f"Rank 1 is in {STEP.text}; ranks 0, 2, 3 are in {REDUCE.text}; rank 5 is in {GATHER.text}; "
        "ranks 4, 6 have not answered."
    )


def test_remedy_is_added_only_if_all_ranks_wait_in_different_places() -> None:
    for places, is_added in (([REDUCE, GATHER], True), ([REDUCE, REDUCE], False), ([REDUCE, STEP], False)):
        assert summarize(dict(enumerate(places)), 2, "Differ.").endswith(" Differ.") == is_added


@pytest.fixture
def begin() -> Iterator[Callable[[], Hangs]]:
    """A function that makes and polls the topic of a process group of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    watcher = RankWatcher("run", patience=60.0, poll_seconds=0.01)

    def run() -> Hangs:
        watcher.add(topic := Hangs(watcher, timedelta(minutes=7), "Strategy(timeout=...)"))
        return topic

    yield run
    watcher.end()
    dist.destroy_process_group()


def test_handler_of_the_user_is_left_alone(begin) -> None:
    arrived: list[int] = []
    handler = lambda *_: arrived.append(1)  # noqa: E731
    before = signal.signal(signal.SIGUSR2, handler)
    try:
        topic = begin()
        os.kill(os.getpid(), signal.SIGUSR2)
        topic.end()

        assert (signal.getsignal(signal.SIGUSR2), arrived) == (handler, [1])
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_a_timeout_that_ends_the_process_is_named_with_its_option(caplog, monkeypatch, begin) -> None:
    monkeypatch.setattr(hangs, "nccl_errors", lambda: ["TIMEOUT"])  # NCCL needs a device
    topic, deadline = begin(), time.monotonic() + 60.0
    while len(caplog.records) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    topic.end()

    stacks, summary = [record.getMessage() for record in caplog.records]
    assert "Rank 0 of 1 (process " in stacks
    assert " in test_a_timeout_that_ends_the_process_is_named_with_its_option\n" in stacks
    why = "A collective of rank 0 did not finish within timeout=0:07:00, set by `Strategy(timeout=...)`. "
    assert summary.startswith(f"{why}NCCL ends this process soon. Rank 0 is in `")
