"""`check` in the rank pool: one set of references for many tests, and the cases as its strategies."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest

from lightning_paral.diagnostics.check_compare import Checks
from lightning_paral.diagnostics.check_run import Fit, Task
from lightning_paral.diagnostics.rank_pool import RankPool
from tests.contract.cases import BY_LABEL


def strategy_of(label: str) -> Callable[[], Any]:
    """Return what makes the strategy of a case: an object, of which a check changes how it draws samples."""
    return partial(BY_LABEL[label].strategy, checkpoint=None)


def checks_of(
    make: Callable[..., Fit], pool: RankPool, folders: pytest.TempPathFactory, steps: int, **options: Any
) -> Callable[..., Checks]:
    """Return a function that returns the `Checks` of `make(*arguments)`, the same for the same arguments."""

    @cache
    def checks(*arguments: Any) -> Checks:
        task = Task(steps=steps, folder=folders.mktemp("check"), seed=3)
        return Checks(partial(make, *arguments), task, pool, **options)

    return checks
