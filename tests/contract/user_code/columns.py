"""The columns of the contract: the strategies, by what the Trainer is given."""

from collections.abc import Callable
from dataclasses import dataclass

from lightning.pytorch.strategies import Strategy

from tests.contract.case import StrategyCase
from tests.contract.cases import CASES


@dataclass(frozen=True)
class Column:
    """A strategy at two ranks, or two devices of one process."""

    label: str
    strategy: Callable[[], str | Strategy]
    on_ranks: bool = True
    always: bool = True
    """Every row runs in it; others name it in `Row.strategies`."""
    themes: tuple[str, ...] = ()
    """Where not empty: only their rows run in it."""
    tolerance: float = 1e-5
    needs_operators: bool = False


NAMES = {"zero3_partitioned": "paral_zero3", "paral_zero3": "paral_zero3_whole"}
"""Column names that are not those of the cases: rows run in stage 3 that partitions the smallest parameters, too."""


def column_of(case: StrategyCase) -> Column:
    themes = case.themes_of_user_code
    return Column(
        NAMES.get(case.label, case.label),
        case.strategy,
        on_ranks=case.has_ranks,
        always=themes != "named",
        themes=themes if isinstance(themes, tuple) else (),
        tolerance=case.tolerance,
        needs_operators=case.needs_operators,
    )


_columns = [column_of(case) for case in CASES if case.themes_of_user_code]
_columns.sort(key=lambda column: (not column.always, "offload" in column.label))
COLUMNS = {column.label: column for column in _columns}

RANKS = tuple(column.label for column in COLUMNS.values() if column.always and column.on_ranks)
"""The columns with a process per device."""
