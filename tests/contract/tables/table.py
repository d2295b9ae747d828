"""A row, a table of rows, and the outcome of a cell."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.contract.tables.lanes import Cell
from tests.contract.tables.run import Run
from tests.contract.user_code.columns import COLUMNS


@dataclass(frozen=True, kw_only=True)
class Row:
    """What a user writes, which runs under several strategies."""

    label: str
    """A unique, short name."""
    text: str
    """The first cell of the row on the page: the label, alone or in `**`, and an explanation."""
    theme: str
    """The name of the file that has the row."""
    scenario: Callable[[Run], dict[str, Any]]
    """A function that runs on each rank and returns results by name. `comparing` compares them."""
    columns: tuple[str, ...]
    num_ranks: int = 2
    """The number of ranks, or of devices of one process."""
    reference: str = "auto"
    """The alternative to one process. `"ddp"`: the results may equal those of Lightning's `ddp` on as many ranks, if
    they come from a rank's own samples and are no means over samples, as the statistics of BatchNorm."""
    tolerance: float = 1e-5
    """The largest difference: relative, and absolute below 1."""
    names: str = ""
    """What a refusal must name: a regular expression. Required if the page has a refusal in the row."""
    patience: float = 150.0
    """Seconds after which a cell counts as hanging."""
    of_one_rank: bool = False
    """Whether only one rank raises the error, and the launcher ends the others, as for any exception."""
    since: str = ""
    """The first version of torch with the outcomes of the page. With earlier ones, cells need only be allowed."""
    apart: tuple[str, ...] = ()
    """Patterns of names of results that are not compared, such as those drawn at random."""
    covers: tuple[str, ...] = ()
    """Names of Lightning's public interface that the row covers, besides those in the label."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of a cell."""

    kind: str
    """`"equal"`, `"as ddp"` or `"refused"`; for a defect `"differs"`, `"fails"` or `"hangs"`."""
    reason: str = ""
    """The first sentence of a refusal, or a description of the defect."""
    detail: str = ""
    """The traceback of an error."""

    @property
    def is_allowed(self) -> bool:
        """Whether the outcome is not a defect."""
        return self.kind in ("equal", "as ddp", "refused")

    @property
    def word(self) -> str:
        """The word of the page."""
        return self.kind if self.is_allowed else "open"


@dataclass(frozen=True, kw_only=True, eq=False)
class Table:
    """A table of rows, its page, and its lanes."""

    package: str
    """The package whose module `table` has this table as `TABLE`."""
    rows: dict[str, Row]
    page: Path
    introduction: str
    titles: dict[str, str]
    """Theme -> heading of its section on the page, in order."""
    clear: tuple[str, ...]
    """Patterns of errors of torch, Lightning and DeepSpeed that count as refusals, because they name what they are
    about."""
    engines: tuple[str, ...]
    """Columns that differ in what they run: see `tests.contract.tables.lanes`."""

    def cells(self) -> list[Cell]:
        """Return all cells, in order."""
        return [(row.label, column) for row in self.rows.values() for column in row.columns]

    def documented_cells(self) -> list[Cell]:
        """Return the cells of the page. Strategies of other packages are not on it."""
        return [cell for cell in self.cells() if COLUMNS[cell[1]].documented]
