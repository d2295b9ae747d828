"""The rows of the table: Lightning's public features, used as its documentation shows them."""

import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from tests.contract.case import StrategyCase
from tests.contract.cases import BY_LABEL, MAIN, PER_ENGINE, PER_PLACEMENT, labels, with_ranks
from tests.contract.tables.table import Row
from tests.contract.user_code.models import Loaders, regression


def columns_for(cases: Iterable[StrategyCase]) -> tuple[str, ...]:
    """Return the labels of the cases that have a column."""
    return labels(case for case in cases if case.themes_of_user_code)


ALL = columns_for(MAIN)
ENOUGH = columns_for(PER_PLACEMENT)
"""For features that do not depend on the optimizer, in which alone ZeRO stages 1 and 2 differ."""
LIGHT = columns_for(PER_ENGINE)
"""For features that depend on the engine only, such as when loops end."""
RANKS = columns_for(with_ranks(PER_PLACEMENT))
"""For features that a single process does not have."""
ROWS: dict[str, Row] = {}


def row(
    label: str, columns: tuple[str, ...] = ENOUGH, num_ranks: int = 2, theme: str = "", **options: Any
) -> Callable[[Any], Any]:
    """Register the decorated scenario as a row of the caller's file."""
    theme = theme or _theme_of_caller()
    run = tuple(column for column in columns if BY_LABEL[column].sizes_among(num_ranks))

    def register(scenario: Any) -> Any:
        assert label not in ROWS, label
        assert "|" not in label, label
        ROWS[label] = Row(
            label=label, text=label, theme=theme, scenario=scenario, columns=run, num_ranks=num_ranks, **options
        )
        return scenario

    return register


def fits(
    label: str, loaders: Loaders = regression, trainer: dict[str, Any] | None = None, **options: Any
) -> Callable[[Any], Any]:
    """Register a row in which the decorated module is fitted."""
    register = row(label, theme=_theme_of_caller(), **options)

    def fit_of(module: Any) -> Any:
        register(lambda run: run.fit(module, loaders=loaders, **(trainer or {})))
        return module

    return fit_of


def _theme_of_caller() -> str:
    return Path(sys._getframe(2).f_code.co_filename).stem
