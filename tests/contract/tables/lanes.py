"""The lane of each cell of a table, by the outcomes on its page.

Rows of one theme whose outcomes are the same in all columns tend to break together: they have one *signature*.
"""

from collections.abc import Mapping

Cell = tuple[str, str]
"""Labels of row and column."""


def lanes(themes: Mapping[str, str], words: Mapping[Cell, str], engines: tuple[str, ...]) -> dict[Cell, str]:
    """Return the lane of each cell on the page: `"default"`, `"full"` or `"all"`.

    The lane default has a row of each signature in one of `engines`, and a row of each theme in all of them. The lane
    full has every row in one of `engines`, in turns, and one row of each theme and outcome in every column.

    Args:
        themes: label of each row -> its theme, in order.
        words: cell -> its outcome on the page.
        engines: columns that differ in what they run.
    """
    by_row: dict[str, dict[str, str]] = {row: {} for row in themes}
    for (row, column), word in words.items():
        if row in by_row:
            by_row[row][column] = word
    default = _of_signatures(themes, by_row, engines)
    default |= _of_themes(themes, by_row, engines, default)
    full, seen = set(), set()
    for number, (row, outcomes) in enumerate(by_row.items()):
        turn = engines[number % len(engines)]
        for column, word in outcomes.items():
            outcome = (themes[row], column, word)
            if outcome not in seen or column == turn:
                full.add((row, column))
            seen.add(outcome)
    cells = [(row, column) for row, outcomes in by_row.items() for column in outcomes]
    return {cell: "default" if cell in default else "full" if cell in full else "all" for cell in cells}


def _of_signatures(
    themes: Mapping[str, str], by_row: Mapping[str, Mapping[str, str]], engines: tuple[str, ...]
) -> set[Cell]:
    """Return the first row of each signature, in a column that rotates."""
    firsts: dict[tuple[object, ...], str] = {}
    for row, outcomes in by_row.items():
        firsts.setdefault((themes[row], *sorted(outcomes.items())), row)
    chosen = set()
    for turn, row in enumerate(firsts.values()):
        own = [column for column in engines if column in by_row[row]]
        if own:
            chosen.add((row, own[turn % len(own)]))
    return chosen


def _of_themes(
    themes: Mapping[str, str], by_row: Mapping[str, Mapping[str, str]], engines: tuple[str, ...], default: set[Cell]
) -> set[Cell]:
    """Return for each theme and column another row, spread over the theme."""
    chosen = set()
    for theme in dict.fromkeys(themes.values()):
        for turn, column in enumerate(engines):
            rows = [row for row in themes if themes[row] == theme and column in by_row[row]]
            others = [row for row in rows if (row, column) not in default]
            if others:
                chosen.add((others[turn * len(others) // len(engines)], column))
    return chosen
