"""Fixtures for tests on several ranks."""

import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from lightning_paral.cli import main
from tests.launching import launch as launch
from tests.rank_pool import RankPool


@pytest.fixture
def in_own_world(rank_pool: RankPool) -> Callable[..., list[Any]]:
    """Like `on_ranks`, for functions that leave the pool's process group, or collectives in it, unfinished."""

    def run(*args: Any, **options: Any) -> list[Any]:
        rank_pool.renew_world()
        try:
            return rank_pool.run(*args, **options)
        finally:
            rank_pool.renew_world()

    return run


@pytest.fixture
def fresh_ranks() -> Iterator[RankPool]:
    """Ranks without remains of other tests, whose memory would be counted."""
    pool = RankPool()
    yield pool
    pool.close()


@pytest.fixture
def paral(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """A function that runs `paral` with arguments in this process, and returns what it prints, or its error."""

    def run(*arguments: Any) -> str:
        monkeypatch.setattr(sys, "argv", ["paral", *map(str, arguments)])
        capsys.readouterr()
        try:
            main()
        except SystemExit as end:
            return str(end)
        return capsys.readouterr().out

    return run
