"""Ranks of a benchmark, which are processes of this machine."""

import os
import signal
import time
from datetime import timedelta

import psutil
import pytest
import torch.distributed as dist

from lightning_paral.diagnostics.bench.rank import Rank
from lightning_paral.diagnostics.bench.ranks import Ranks, run_on_ranks
from lightning_paral.errors import ConfigurationError, RankFailedError

HERE = __name__
MINUTE = timedelta(minutes=1)


def failing_alone(rank: Rank) -> None:
    print("before the error")
    raise ValueError("no such thing")


def failing(rank: Rank, how: str) -> None:
    group = rank.join_group()
    if rank.rank == 1:
        if how == "configuration":
            raise ConfigurationError("the option is wrong.")
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier(group)


def in_turns(rank: Rank) -> None:
    number = 0
    while not rank.wait_for_turn(number):
        rank.end_turn(number, [rank.rank, number])
        number += 1


def sleeping(rank: Rank) -> None:
    time.sleep(60)


@pytest.mark.parametrize(
    ("how", "kind", "message"),
    [
        ("configuration", ConfigurationError, "^the option is wrong.$"),
        ("killed", RankFailedError, "rank 1: its process was killed by SIGKILL"),
    ],
)
def test_first_error_of_a_rank_is_raised_and_all_are_killed(how: str, kind: type[Exception], message: str) -> None:
    started: list[int] = []

    def run() -> None:
        with Ranks(f"{HERE}:failing", {"how": how}, num_ranks=2, timeout=MINUTE) as ranks:
            started.extend(process.pid for process in ranks._processes)
            ranks.results()

    with pytest.raises(kind, match=message):
        run()
    assert started
    assert not any(psutil.pid_exists(pid) for pid in started)


def test_ranks_measure_in_turns() -> None:
    with Ranks(f"{HERE}:in_turns", {}, num_ranks=2, timeout=MINUTE) as ranks:
        assert [ranks.take_turn(number) for number in range(2)] == [[[0, 0], [1, 0]], [[0, 1], [1, 1]]]
        ranks.end_turns(2)
        assert ranks.results() == [None, None]


def test_error_of_a_rank_has_what_it_printed() -> None:
    with pytest.raises(RankFailedError, match="rank 0 failed with ValueError: no such thing") as caught:
        run_on_ranks(f"{HERE}:failing_alone", {}, num_ranks=1, timeout=MINUTE)
    assert "before the error" in str(caught.value)


def test_ranks_that_take_too_long_are_named() -> None:
    with (
        pytest.raises(RankFailedError, match="rank 0 did not end within 0:00:01"),
        Ranks(f"{HERE}:sleeping", {}, num_ranks=1, timeout=timedelta(seconds=1)) as ranks,
    ):
        ranks.results()


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGKILL])
def test_ranks_end_with_the_command(launch, signum: int) -> None:
    program = (
        "from lightning_paral.diagnostics.bench.ranks import Ranks\n"
        f"with Ranks('{HERE}:sleeping', {{}}, num_ranks=1) as ranks:\n"
        "    print(ranks._processes[0].pid, flush=True)\n"
        "    ranks.results()\n"
    )
    command = launch("-c", program)
    rank = psutil.Process(int(next(line for line in command.stdout if line.strip().isdigit())))
    command.send_signal(signum)
    command.wait(timeout=30)
    rank.wait(timeout=30)  # raises psutil.TimeoutExpired
