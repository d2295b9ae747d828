"""A row of the contract: one public feature of Lightning, used as its documentation shows it."""

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
    """One feature, used under every strategy."""

    label: str
    """Unique and short: what the user writes."""
    theme: str
    """The file it is in."""
    scenario: Callable[[Run], dict[str, Any]]
    """Uses the feature on one rank; returns what came of it, by name. See `comparing` for how values are compared."""
    columns: tuple[str, ...] = ENOUGH
    num_ranks: int = 2
    """How many ranks run it, or devices of one process."""
    reference: str = "auto"
    """What it may equal beside one process: `"ddp"`, Lightning's own at the same number of ranks."""
    tolerance: float = 1e-5
    covers: tuple[str, ...] = ()
    """Names of the public interface it stands for, where the label does not have them."""
    names: str = ""
    """What a refusal has to name, as a regular expression."""
    patience: float = 150.0
    """Seconds after which a cell counts as hanging."""
    of_one_rank: bool = False
    """The error is one rank's own: whatever started the ranks ends the others, as for any exception."""


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
