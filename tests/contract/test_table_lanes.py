"""Which lane runs a cell of a table follows from the outcomes on its page."""

from collections import Counter

from tests.contract.tables.lanes import lanes

ROWS = {f"row {number}": "first" if number < 6 else "second" for number in range(10)}
COLUMNS = ("a", "b", "c", "d")
ENGINES = ("a", "b", "c")


def words(**other: str) -> dict[tuple[str, str], str]:
    """Return "equal" for all cells but those in `other`, such as `d4="refused"`."""
    return {(row, column): other.get(f"{column}{row[-1]}", "equal") for row in ROWS for column in COLUMNS}


def test_default_has_a_row_of_each_signature_and_of_each_theme_in_each_engine() -> None:
    by_cell = lanes(ROWS, words(d4="refused"), ENGINES)

    default = {cell for cell, lane in by_cell.items() if lane == "default"}
    signatures = {("row 0", "a"), ("row 4", "b"), ("row 6", "c")}
    assert signatures <= default
    assert Counter((ROWS[row], column) for row, column in default - signatures) == {
        (theme, column): 1 for theme in ("first", "second") for column in ENGINES
    }


def test_full_has_each_row_in_turns_and_each_outcome_of_a_theme_in_every_column() -> None:
    by_cell = lanes(ROWS, words(d4="refused"), ENGINES)

    runs = {cell for cell, lane in by_cell.items() if lane != "all"}
    assert {(row, "abc"[number % 3]) for number, row in enumerate(ROWS)} <= runs
    assert {(row, column) for row in ("row 0", "row 6") for column in COLUMNS} <= runs
    assert {row for row, column in runs if column == "d"} == {"row 0", "row 4", "row 6"}
    assert by_cell["row 7", "c"] == by_cell["row 5", "d"] == "all"
