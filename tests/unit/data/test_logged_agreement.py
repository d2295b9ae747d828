"""Ranks that wait for a logged value compare what they have reduced."""

from typing import Any

import pytest
from torch.distributed import HashStore

from lightning_paral.data import logged_agreement
from lightning_paral.data.logged_agreement import LoggedAgreement
from lightning_paral.data.logged_steps import LoggedSteps
from lightning_paral.distributed.mesh import ParallelDims

ERROR = (
    "The ranks have not synchronized the same values in batch 0: ranks 0, 1 logged 'a' with sync_dist=True and "
    "rank 2 did not."
)


@pytest.fixture(autouse=True)
def at_once(monkeypatch) -> None:
    for name in ("_TELL_AFTER", "_COMPARE_AFTER", "_COMPARE_OTHERWISE_AFTER", "_GRACE_SECONDS"):
        monkeypatch.setattr(logged_agreement, name, -1.0)


class Rank:
    """A rank that polls a store with others."""

    def __init__(self, rank: int, store: HashStore) -> None:
        self.steps = LoggedSteps()
        self.errors: list[str] = []
        self.store: Any = store
        self.agreement = LoggedAgreement(self.steps, ParallelDims(rank=rank, replicate=3), self.fail)

    def fail(self, error: Exception, where: str) -> None:
        self.errors.append(str(error))

    def poll(self, times: int = 1) -> None:
        for _ in range(times):
            self.agreement.poll(self.store)


def test_rank_compares_when_the_one_that_did_has_gone_on() -> None:
    store = HashStore()
    first, second, third = (Rank(rank, store) for rank in range(3))
    for rank in (first, second):
        rank.steps.begin_step("batch 0")
        rank.steps.begin_reduction("logged 'a' with sync_dist=True")
        rank.poll(2)
    first.steps.begin_part()
    first.poll()
    third.steps.begin_step("batch 0")
    third.steps.begin_step("batch 1")
    third.steps.begin_part()
    third.poll(2)

    second.poll(2)

    assert [error[: len(ERROR)] for error in second.errors] == [ERROR]
    assert not first.errors + third.errors
