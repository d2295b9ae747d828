"""The rows of the table: Lightning's public features, used as its documentation shows them."""

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.contract.case import StrategyCase
from tests.contract.cases import MAIN, OWN_CASES, PER_ENGINE, PER_PLACEMENT, labels, with_ranks
from tests.contract.lightning_api.run import Run


def columns_for(cases: Iterable[StrategyCase]) -> tuple[str, ...]:
    """Return the labels of the cases that have a column."""
    return labels(case for case in cases if case.themes_of_user_code)


ALL = columns_for(MAIN)
DOCUMENTED = columns_for(case for case in MAIN if case in OWN_CASES)
"""The columns of the page. Strategies of other packages are not on it: their cells must be allowed."""
ENOUGH = columns_for(PER_PLACEMENT)
"""For features that do not depend on the optimizer, in which alone ZeRO stages 1 and 2 differ."""
LIGHT = columns_for(PER_ENGINE)
"""For features that depend on the engine only, such as when loops end."""
RANKS = columns_for(with_ranks(PER_PLACEMENT))
"""For features that a single process does not have."""


@dataclass(frozen=True)
class Row:
    """A feature, which is used under every strategy."""

    label: str
    """What the user writes: unique and short."""
    theme: str
    """The name of the file that has the row."""
    scenario: Callable[[Run], dict[str, Any]]
    """A function that uses the feature on one rank and returns its results by name. `comparing` compares them."""
    columns: tuple[str, ...] = ENOUGH
    num_ranks: int = 2
    """The number of ranks, or of devices of one process."""
    reference: str = "auto"
    """The alternative to one process. `"ddp"`: the results may equal those of Lightning's `ddp` on as many ranks."""
    tolerance: float = 1e-5
    """The largest difference: relative, and absolute below 1."""
    covers: tuple[str, ...] = ()
    """Names of Lightning's public interface that the row covers, besides those in the label."""
    names: str = ""
    """A regular expression that the message of a refusal must match."""
    patience: float = 150.0
    """Seconds after which a cell counts as hanging."""
    of_one_rank: bool = False
    """Whether only one rank raises the error, and the launcher ends the others, as for any exception."""


ROWS: dict[str, Row] = {}


def row(label: str, **options: Any) -> Callable[[Any], Any]:
    """Register the decorated scenario as a row."""
    file = sys._getframe(1).f_code.co_filename

    def register(scenario: Any) -> Any:
        assert label not in ROWS, label
        assert "|" not in label, label
        ROWS[label] = Row(label, Path(file).stem, scenario, **options)
        return scenario

    return register
