"""A rank notices at once that the process of another one has died, but not that it ended the run."""

import multiprocessing
import os
import signal
import time
from collections.abc import Callable

import pytest

from lightning_paral.distributed.failures.liveness import Liveness, LivenessOfOthers, LivenessOfRankZero


def poll_until(condition: Callable[[], bool], *all_liveness: Liveness) -> bool:
    deadline = time.monotonic() + 20
    while not condition() and time.monotonic() < deadline:
        for liveness in all_liveness:
            liveness.poll()
        time.sleep(0.01)
    return condition()


@pytest.fixture
def rank_0():
    liveness = LivenessOfOthers("127.0.0.1")
    liveness.dead = []
    liveness.on_death = liveness.dead.append
    yield liveness
    liveness.end()


def connected(rank_0: LivenessOfOthers, rank: int) -> LivenessOfRankZero:
    liveness = LivenessOfRankZero(rank, rank_0.address)
    liveness.dead = []
    liveness.on_death = liveness.dead.append
    assert poll_until(lambda: rank in rank_0._ranks and liveness._is_accepted, rank_0, liveness)
    return liveness


def wait_to_be_killed(rank: int, address: str) -> None:
    liveness = LivenessOfRankZero(rank, address)
    while True:
        liveness.poll()
        time.sleep(0.01)


def test_rank_0_notices_the_rank_that_was_killed_and_no_other(rank_0) -> None:
    lives = connected(rank_0, 1)
    context = multiprocessing.get_context("fork")
    killed = context.Process(target=wait_to_be_killed, args=(2, rank_0.address))
    killed.start()
    assert poll_until(lambda: 2 in rank_0._ranks, rank_0)
    assert killed.pid is not None
    os.kill(killed.pid, signal.SIGSTOP)
    for _ in range(20):
        rank_0.poll()
    assert rank_0.dead == []  # a process that is stopped is alive
    os.kill(killed.pid, signal.SIGKILL)

    assert poll_until(lambda: rank_0.dead != [], rank_0, lives)

    assert rank_0.dead == [2]
    assert lives.dead == []
    killed.join(timeout=20)
    lives.end()


def test_goodbye_is_not_a_death_and_each_rank_learns_it_of_the_other(rank_0) -> None:
    first, second = connected(rank_0, 1), connected(rank_0, 2)

    first.say_goodbye()
    rank_0.say_goodbye()
    assert poll_until(lambda: not first.has_others and not second.has_others, rank_0, first, second)
    assert rank_0.has_others  # rank 2
    second._connection.close()

    assert poll_until(lambda: not rank_0.has_others, rank_0)
    assert rank_0.dead == [2]
    assert first.dead == second.dead == []


def test_death_of_rank_0_is_noticed_although_a_forked_process_lives_on() -> None:
    rank_0 = LivenessOfOthers("127.0.0.1")
    other = connected(rank_0, 1)
    child = os.fork()  # such as a loader worker
    if child == 0:
        time.sleep(30)
        os._exit(0)
    try:
        time.sleep(0.1)
        rank_0._ranks[1].close()  # as the operating system does when the process dies

        assert poll_until(lambda: other.dead != [], other)
        assert other.dead == [0]
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        rank_0.end()
