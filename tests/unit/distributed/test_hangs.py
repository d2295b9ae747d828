"""The sentence that says where all ranks are, and what one process can show of asking for it."""

import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from lightning_paral.distributed import hangs
from lightning_paral.distributed.hangs import Hangs, Place, place_of, summarize
from lightning_paral.distributed.watcher import RankWatcher
from tests.models.linear import Linear
from tests.running import quiet_trainer

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


def place_in(function: Callable[[], object], built_in: str) -> Place:
    """Call `function`, and return the place of the first call of a function written in C."""
    seen: list[Place] = []

    def look(frame: FrameType, event: str, called: Any) -> None:
        if event == "c_call" and called.__name__ == built_in:
            seen.append(place_of(traceback.walk_stack(frame)))

    sys.setprofile(look)
    try:
        function()
    finally:
        sys.setprofile(None)
    return seen[0]


def line(text: str) -> str:
    """Return the file and line of this module whose code is `text`."""
    with open(__file__) as source:
        return f"test_hangs.py:{next(number for number, each in enumerate(source, 1) if each.strip() == text)}"


class Sleeping(Linear):
    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        time.sleep(0)
        return super().training_step(batch, batch_idx)


def fit() -> None:
    quiet_trainer(devices=1, max_steps=1).fit(Sleeping(), DataLoader(torch.ones(1, 4)))


def test_innermost_line_of_the_user_is_named() -> None:
    assert place_in(fit, "sleep") == Place(f"`training_step` ({line('time.sleep(0)')})", waits=False)


def test_collective_is_named_below_the_line_that_called_it() -> None:
    def tell() -> None:
        dist.all_reduce(torch.ones(1))

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        place = place_in(tell, "wait")
    finally:
        dist.destroy_process_group()

    called_at = re.escape(line("dist.all_reduce(torch.ones(1))"))
    torchs = r"`all_reduce` \(torch/distributed/distributed_c10d.py:\d+\)"
    assert re.fullmatch(rf"`tell` \({called_at}\), in {torchs}", place.text)
    assert place.waits
