"""Errors that all ranks raise together, first differences, and names of ranks in messages."""

import pytest

from lightning_paral.distributed.exchange import all_ranks, first_difference, name_ranks
from lightning_paral.distributed.failure import is_told
from lightning_paral.errors import CheckpointError


def fail_on_rank_1() -> tuple[bool, str]:
    ranks = all_ranks()

    def action() -> None:
        if ranks.rank == 1:
            raise ValueError("the disk is full")

    with pytest.raises(CheckpointError) as caught:
        ranks.run_on_all("Saving", action)
    return is_told(caught.value), str(caught.value)


def test_only_the_rank_that_failed_has_the_traceback_of_an_agreed_error(on_ranks) -> None:
    told, messages = zip(*on_ranks(2, fail_on_rank_1), strict=True)

    assert told == (True, False)
    assert set(messages) == {"Saving failed on rank 1 of 2: ValueError: the disk is full"}


def test_groups_of_ranks_are_named_together() -> None:
    by_rank = {rank: {("`a`", "has shape"): "(1,)" if rank == 1 else "(2,)"} for rank in range(3)}
    assert first_difference(by_rank) == "`a` has shape (2,) on ranks 0, 2 and (1,) on rank 1"


def test_another_order_is_named() -> None:
    facts = {("`a`", "is"): "1", ("`b`", "is"): "2"}
    message = first_difference({0: facts, 1: dict(reversed(facts.items()))})
    assert message == "The order differs: the first one that differs is `a` on rank 0 and `b` on rank 1"


@pytest.mark.parametrize(
    ("ranks", "name"),
    [
        ((1,), "rank 1"),
        ((0, 2, 3, 4), "ranks 0, 2 to 4"),
        (range(0, 40, 2), "ranks 0, 2, 4, 6, 8, 10, 12, 14, ... (20 ranks)"),
    ],
)
def test_ranks_are_named_in_few_words(ranks: tuple[int, ...], name: str) -> None:
    assert name_ranks(ranks) == name
