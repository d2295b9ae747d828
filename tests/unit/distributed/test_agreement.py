"""Errors that all ranks raise together."""

import pytest

from lightning_paral.distributed.agreement import all_ranks
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
