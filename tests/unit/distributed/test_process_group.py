"""Ranks meet in a store that has keys of earlier starts, and missing ranks are named."""

import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from lightning_paral.distributed.process_group import meet
from lightning_paral.errors import ProcessGroupError

SECONDS = timedelta(seconds=60)
SHORT = timedelta(seconds=0.5)


@pytest.fixture
def open_store() -> Callable[[], Any]:
    """Return a function that opens the same store again, as each process does."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return lambda: dist.TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False)


def join(
    open_store: Callable[[], Any],
    ranks: Iterable[int],
    world_size: int,
    timeout: timedelta = SECONDS,
    delays: dict[int, float] | None = None,
) -> dict[int, Any]:
    """Let `ranks` meet, each in its own thread with its own store; return the namespace or the error of each."""

    def run(rank: int) -> Any:
        store = open_store()
        time.sleep((delays or {}).get(rank, 0.0))
        try:
            return meet(store, rank, world_size, timeout)
        except ProcessGroupError as error:
            return error

    ranks = list(ranks)
    with ThreadPoolExecutor(max_workers=len(ranks)) as pool:
        return dict(zip(ranks, pool.map(run, ranks), strict=True))


def assert_met(namespaces: dict[int, Any], word: str) -> None:
    """Assert that all ranks share one namespace, which nobody has used before."""
    for rank, namespace in namespaces.items():
        assert not isinstance(namespace, Exception), f"rank {rank}: {namespace}"
        assert not namespace.check(["word"])
    namespaces[0].set("word", word)
    for namespace in namespaces.values():
        assert namespace.get("word").decode() == word


def test_ranks_meet_again_in_the_same_store(open_store: Callable[[], Any]) -> None:
    for word, late in (("first", 0), ("second", 0), ("third", 2)):
        # With rank 0 late, the others first read the name of the meeting before.
        assert_met(join(open_store, range(3), 3, delays={late: 0.2}), word)


def test_ranks_meet_after_a_start_that_failed(open_store: Callable[[], Any]) -> None:
    failed = join(open_store, (0, 1), 3, SHORT)
    assert all("rank 2 of 3 has not joined" in str(error) for error in failed.values()), failed

    assert_met(join(open_store, range(3), 3, delays={0: 0.2}), "again")


def test_ranks_meet_after_rank_0_was_killed_while_it_waited(open_store: Callable[[], Any]) -> None:
    dead = open_store()
    prefix = dist.PrefixStore("lightning_paral/2", dead)
    prefix.set("current", "dead")
    prefix.set("dead/answer/1", "the process that was rank 1")

    assert_met(join(open_store, range(2), 2, delays={0: 0.2}), "alive")


def test_ranks_meet_at_other_world_sizes_in_the_same_store(open_store: Callable[[], Any]) -> None:
    for world_size in (4, 2, 4, 1):
        assert_met(join(open_store, range(world_size), world_size), str(world_size))


@pytest.mark.parametrize(
    ("joining", "world_size", "message"),
    [
        ((0, 1), 4, "ranks 2, 3 of 4 have not joined."),
        ((1,), 2, "rank 0 of 2 has not joined."),
        ((0,), 12, "ranks 1 to 11 of 12 have not joined."),
    ],
)
def test_missing_ranks_are_named(
    open_store: Callable[[], Any], joining: tuple[int, ...], world_size: int, message: str
) -> None:
    outcomes = join(open_store, joining, world_size, SHORT)

    assert [str(error) for error in outcomes.values()] == [message] * len(joining)
