"""The lane of each cell of a table, by the outcomes on its page.

Rows of one theme whose outcomes are the same in all columns tend to break together: they have one *signature*.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

Cell = tuple[str, str]
"""Labels of row and column."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Which columns the lanes run, and how much of each."""

    engines: tuple[str, ...]
    """The columns of the default lane, which has a row of each signature in one of them, and of each theme in all."""
    follows: Mapping[str, str] = field(default_factory=dict)
    """Column -> a column with mostly the same outcomes. The full lane runs it where the two differ."""
    in_turns: tuple[str, ...] = ()
    """Columns of which the full lane runs one for each row, in turns.

    It also has one row of each theme and outcome of every column. Columns that are neither here nor in `follows` are
    whole in it.
    """


def lanes(themes: Mapping[str, str], words: Mapping[Cell, str], rule: Rule) -> dict[Cell, str]:
    """Return the lane of each cell on the page: `"default"`, `"full"` or `"all"`.

    Args:
        themes: label of each row -> its theme, in order.
        words: cell -> its outcome on the page.
        rule: the rule of the table.
    """
    by_row: dict[str, dict[str, str]] = {row: {} for row in themes}
    for (row, column), word in words.items():
        if row in by_row:
            by_row[row][column] = word
    default = _of_signatures(themes, by_row, rule.engines)
    default |= _of_themes(themes, by_row, rule.engines, default)
    full, seen = set(default), set()
    for number, (row, outcomes) in enumerate(by_row.items()):
        turn = rule.in_turns[number % len(rule.in_turns)] if rule.in_turns else None
        for column, word in outcomes.items():
            is_first = (themes[row], column, word) not in seen
            seen.add((themes[row], column, word))
            differs = column in rule.follows and outcomes.get(rule.follows[column]) != word
            is_whole = column not in rule.follows and column not in rule.in_turns
            if is_first or differs or is_whole or column == turn:
                full.add((row, column))
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
