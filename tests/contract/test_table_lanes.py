"""Which lane runs a cell of a table follows from the outcomes on its page."""

from collections import Counter

from tests.contract.tables.lanes import Rule, lanes

ROWS = {f"row {number}": "first" if number < 6 else "second" for number in range(10)}
COLUMNS = ("a", "b", "c", "d")
RULE = Rule(engines=("a", "b", "c"), follows={"c": "b", "d": "b"}, in_turns=("b", "c"))


def words(**other: str) -> dict[tuple[str, str], str]:
    """Return "equal" for all cells but those in `other`, such as `d4="refused"`."""
    return {(row, column): other.get(f"{column}{row[-1]}", "equal") for row in ROWS for column in COLUMNS}


def test_default_has_a_row_of_each_signature_and_of_each_theme_in_each_engine() -> None:
    by_cell = lanes(ROWS, words(d4="refused"), RULE)

    default = {cell for cell, lane in by_cell.items() if lane == "default"}
    signatures = {("row 0", "a"), ("row 4", "b"), ("row 6", "c")}
    assert signatures <= default
    assert Counter((ROWS[row], column) for row, column in default - signatures) == {
        (theme, column): 1 for theme in ("first", "second") for column in RULE.engines
    }


def test_full_has_whole_columns_columns_in_turns_and_cells_that_differ() -> None:
    by_cell = lanes(ROWS, words(d4="refused"), RULE)

    runs = {cell for cell, lane in by_cell.items() if lane != "all"}
    assert {(row, "a") for row in ROWS} <= runs
    assert {(row, "bc"[number % 2]) for number, row in enumerate(ROWS)} <= runs
    assert {row for row, column in runs if column == "d"} == {"row 0", "row 4", "row 6"}
    assert by_cell["row 8", "c"] == by_cell["row 5", "d"] == "all"


def test_cell_that_the_leading_column_does_not_have_is_in_full() -> None:
    outcomes = words()
    del outcomes["row 5", "b"]

    assert lanes(ROWS, outcomes, RULE)["row 5", "d"] == "full"
