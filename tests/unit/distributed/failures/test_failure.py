"""The first failure of a run is recorded once, and consequences of a failure are told from failures."""

import pickle

import pytest
import torch.distributed as dist

from lightning_paral.distributed.failures.failure import (
    Failure,
    FirstFailure,
    InterruptedByFailure,
    failure_of,
    first_failure_of,
    is_interruption,
    remember_first,
)
from lightning_paral.errors import RankFailedError


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:
        return caught


def test_first_record_counts_for_all_ranks() -> None:
    store = dist.HashStore()
    ranks = [FirstFailure(store, rank) for rank in range(3)]
    second = failure_of(raised(ValueError("my\nbug")), 1, "training batch 3 of epoch 0")
    late = failure_of(raised(KeyError("late")), 0, "teardown")

    assert ranks[2].check() is None
    assert ranks[1].report(second) == second
    assert ranks[0].report(late) == second
    assert ranks[2].check() == second
    assert [rank.is_own for rank in ranks] == [False, True, False]
    assert str(second).startswith("rank 1 (")
    assert str(second).endswith(") failed in training batch 3 of epoch 0: ValueError: my bug")
    assert "in raised\n" in second.traceback


def test_failure_names_the_error_of_a_loader_worker_without_its_traceback() -> None:
    message = (
        "Caught ValueError in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\n"
        '  File "train.py", line 3, in __getitem__\n    raise ValueError("my bug")\nValueError: my bug\n  in my data\n'
    )
    failure = failure_of(raised(ValueError(message)), 0, "")

    assert (
        failure.error == "ValueError: Caught ValueError in DataLoader worker process 0. ValueError: my bug in my data"
    )
    assert "in __getitem__" in failure.traceback


class BrokenStore:
    def check(self, *arguments: object) -> bool:
        raise RuntimeError("Connection reset by peer")

    compare_set = set = check


def test_without_a_store_a_rank_keeps_its_own_record() -> None:
    first = FirstFailure(BrokenStore(), 1)
    died = Failure(rank=0, node="", error="its process ended without an exception", has_died=True)

    assert first.report(died) == died
    assert str(died) == "rank 0 died: its process ended without an exception"
    assert not first.wait_until_printed(5.0)


def test_one_of_the_waiting_ranks_prints_what_the_failed_rank_did_not() -> None:
    store = dist.HashStore()
    failed, first, second = (FirstFailure(store, rank) for rank in range(3))
    failed.report(failure_of(raised(ValueError("my bug")), 0, ""))
    assert first.check() is not None
    assert second.check() is not None

    assert first.wait_until_printed(0.1)
    assert not second.wait_until_printed(0.1)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:6877."),
        dist.DistNetworkError("failed to recv, got 0 bytes"),
        InterruptedByFailure("Rank 0 ended because rank 1 failed"),
        RankFailedError("Rank 0 ended because rank 1 failed"),
    ],
)
def test_errors_of_interrupted_collectives_are_consequences(error: BaseException) -> None:
    assert is_interruption(error)
    wrapped = ValueError("could not log")
    wrapped.__cause__ = error
    assert is_interruption(wrapped)


def test_other_errors_are_not() -> None:
    for error in (ValueError("Connection closed by peer"), RuntimeError("size mismatch"), KeyboardInterrupt()):
        assert not is_interruption(error)


def test_error_remembers_the_first_failure_of_its_run_until_it_is_pickled() -> None:
    error = ValueError("my bug")
    assert first_failure_of(error) is None
    first = FirstFailure(dist.HashStore(), 0)
    remember_first(error, first)
    assert first_failure_of(error) is first
    assert first_failure_of(pickle.loads(pickle.dumps(error))) is None
