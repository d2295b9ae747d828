"""How the process that started the ranks learns of their ends."""

import os
import signal
import time
from typing import Any

import pytest

from lightning_paral.distributed.launching.rank_processes import run_ranks
from lightning_paral.errors import RankFailedError


class UnpicklableError(Exception):
    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} {second}")


def run(target: Any, num_ranks: int = 2) -> Any:
    return run_ranks(target, (), ranks=range(num_ranks), method="fork", on_start=lambda processes: None)


def die_with_a_child(rank: int) -> None:
    """Die while a process that this rank has forked keeps its files open."""
    if os.fork() == 0:
        time.sleep(60)
        os._exit(0)
    os.kill(os.getpid(), signal.SIGKILL)


def test_death_is_noticed_although_a_child_of_the_rank_lives() -> None:
    began = time.monotonic()

    with pytest.raises(RankFailedError, match=r"Rank 0 died.*SIGKILL"):
        run(die_with_a_child, 1)

    assert time.monotonic() - began < 30


def raise_and_die(rank: int) -> None:
    if rank == 0:
        raise UnpicklableError("my", "mistake")
    time.sleep(1)
    os._exit(1)


def test_error_that_cannot_be_pickled_is_still_the_first_cause() -> None:
    with pytest.raises(RankFailedError, match=r"Rank 0 failed: .*UnpicklableError: my mistake"):
        run(raise_and_die)
