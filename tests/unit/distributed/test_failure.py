"""The first failure of a run is recorded once, and consequences of a failure are told from failures."""

import pickle
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_paral.distributed import failure
from lightning_paral.distributed.failure import (
    Failure,
    FailureWatch,
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
    first = FirstFailure(BrokenStore(), 1, 2)
    died = Failure(rank=0, error="its process ended without an exception", has_died=True)

    assert first.report(died) == died
    assert str(died) == "rank 0 died: its process ended without an exception"
    assert not first.agree("step", "7")


def test_one_of_the_waiting_ranks_prints_what_the_failed_rank_did_not(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failure, "END_SECONDS", 0.1)
    store = dist.HashStore()
    failed, first, second = (FirstFailure(store, rank, 3) for rank in range(3))
    failed.report(failure_of(raised(ValueError("my bug")), 0, ""))
    for rank in (first, second):
        assert rank.check() is not None
        rank.print_after(f"Rank {rank.rank} ended")
    failed.print_own(lambda: sys.stderr.write("late"))

    printed = capsys.readouterr().err
    assert printed.count("Traceback") == 1
    assert printed.splitlines()[-3:] == ["Rank 1 ended", "Rank 2 ended", "Rank 0 ended: ValueError: my bug"]


@pytest.mark.parametrize(("values", "agree"), [(["7", "7"], True), (["7", "8"], False), (["7", ""], False)])
def test_ranks_agree_only_if_all_give_the_same_value(values: list[str], agree: bool) -> None:
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as pool:
        ranks = [FirstFailure(store, rank, 2) for rank in range(2)]
        found = list(pool.map(lambda rank: rank.agree("step", values[rank.rank]), ranks))

    assert found == [agree, agree]


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:6877."), True),
        (dist.DistNetworkError("failed to recv, got 0 bytes"), True),
        (InterruptedByFailure("Rank 0 ended because rank 1 failed"), True),
        (RankFailedError("Rank 0 ended because rank 1 failed"), True),
        (ValueError("Connection closed by peer"), False),
        (RuntimeError("size mismatch"), False),
        (KeyboardInterrupt(), False),
    ],
)
def test_errors_of_interrupted_collectives_are_consequences(error: BaseException, expected: bool) -> None:
    wrapped = ValueError("could not log")
    wrapped.__cause__ = error
    assert is_interruption(error) == is_interruption(wrapped) == expected


def test_error_remembers_the_first_failure_of_its_run_until_it_is_pickled() -> None:
    error = ValueError("my bug")
    assert first_failure_of(error) is None
    first = FirstFailure(dist.HashStore(), 0, 1)
    remember_first(error, first)
    assert first_failure_of(error) is first
    assert first_failure_of(pickle.loads(pickle.dumps(error))) is None


class SGD(torch.optim.SGD):
    """Is interrupted while it changes the weights, and then in its closure if it has one."""

    def step(self, closure: Any = None) -> Any:
        signal.raise_signal(failure._SIGNUM)
        return closure() if closure is not None else None


def test_main_thread_is_interrupted_but_not_while_weights_change_nor_after_it_has_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(failure, "store_port", lambda: None)
    watcher: Any = SimpleNamespace(rank=0, world_size=2, store=dist.HashStore())
    watch = FailureWatch(watcher)
    optimizer = SGD([torch.zeros(1, requires_grad=True)], 0.1)

    def closure() -> None:
        signal.raise_signal(failure._SIGNUM)

    signal.raise_signal(failure._SIGNUM)  # no rank has failed
    watch.first.report(Failure(rank=1, error="my bug"))
    optimizer.step()
    for call in (closure, lambda: optimizer.step(closure)):
        with pytest.raises(InterruptedByFailure, match="Rank 0 ended because rank 1 failed: my bug"):
            call()
    watch.leave()
    signal.raise_signal(failure._SIGNUM)
    watch.end()
    assert signal.getsignal(failure._SIGNUM) == signal.SIG_DFL
