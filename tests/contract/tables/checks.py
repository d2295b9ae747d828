"""The cells of a table as parameters of a test, and what the test asserts."""

from functools import cache
from typing import Any

import pytest
import torch
from packaging.version import Version

from lightning_paral.diagnostics.rank_pool import RankPool
from tests.contract.tables import page
from tests.contract.tables.lanes import Cell, lanes
from tests.contract.tables.outcomes import outcome
from tests.contract.tables.table import Outcome, Table
from tests.contract.user_code.columns import COLUMNS


@cache
def on_page(table: Table) -> dict[Cell, Outcome]:
    """Return the outcomes on the page."""
    return page.read(table)


def parameters(table: Table) -> list[Any]:
    """Return all cells as parameters `row` and `column`, marked with their lanes. A new cell is in the default lane."""
    words = {cell: found.kind for cell, found in on_page(table).items()}
    by_cell = lanes({row.label: row.theme for row in table.rows.values()}, words, table.engines)
    return [pytest.param(*cell, marks=pytest.mark.lane(by_cell.get(cell, "default"))) for cell in table.cells()]


def assert_as_on_page(table: Table, row: str, column: str, pool: RankPool) -> None:
    """Assert that the cell equals its reference or is refused, by an error that names the cause, as its page says."""
    found = outcome(table, row, column, pool)
    assert found.is_allowed, f"{found.kind}: {found.reason}\n{found.detail}"
    is_earlier = Version(torch.__version__).release < Version(table.rows[row].since or "0").release
    expected = on_page(table).get((row, column))
    if expected is not None and not is_earlier:
        advice = f"If this is intended: python -m {table.package} '{row}' {column} --write"
        assert found.word == expected.kind, f"{found.reason}\n{advice}"


def assert_complete(table: Table) -> None:
    """Assert that the page has every cell and no open one, and that the row or the column of a refusal says what it
    must name."""
    said = on_page(table)
    missing = set(table.documented_cells()) - said.keys()
    assert not missing, f"Run them: python -m {table.package} --write --only-new"
    assert said.keys() == set(table.documented_cells()), "The page has cells that no longer run"
    assert [cell for cell, found in said.items() if not found.is_allowed] == []
    refused = [cell for cell, found in said.items() if found.kind == "refused"]
    assert [(row, column) for row, column in refused if not (table.rows[row].names or COLUMNS[column].names)] == []
