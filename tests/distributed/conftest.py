"""Fixtures for tests on several ranks."""

import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from lightning_paral.cli import main
from lightning_paral.diagnostics.rank_pool import RankPool


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
