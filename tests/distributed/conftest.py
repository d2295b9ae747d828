"""Fixtures for tests on several ranks."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from lightning_paral.diagnostics.rank_pool import RankPool
from tests.command import run_paral


@pytest.fixture
def fresh_ranks() -> Iterator[RankPool]:
    """Ranks without remains of other tests, whose memory would be counted."""
    pool = RankPool()
    yield pool
    pool.close()


@pytest.fixture
def paral(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """A function that runs `paral` with arguments in this process, and returns what it prints, or its error."""

    def run(*arguments: Any) -> str:
        capsys.readouterr()
        said = run_paral(*map(str, arguments))
        return capsys.readouterr().out if said is None else str(said)

    return run
