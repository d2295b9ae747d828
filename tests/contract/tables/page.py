"""Write and read the page of a table, which has the expected outcome of every cell."""

import re
from collections.abc import Iterable, Mapping

from tests.contract.tables.lanes import Cell
from tests.contract.tables.table import Outcome, Table
from tests.contract.user_code.columns import COLUMNS

HEADINGS = {label: f"`{label}`" for label in COLUMNS} | {"paral_zero3_whole": "`paral_zero3`, defaults"}


def write(table: Table, outcomes: Mapping[Cell, Outcome]) -> None:
    """Write the page from the outcomes of all cells."""
    notes: dict[str, int] = {}
    lines = [table.introduction]
    for theme, title in table.titles.items():
        rows = [row for row in table.rows.values() if row.theme == theme]
        run = {column for row in rows for column in row.columns if COLUMNS[column].documented}
        columns = [label for label in COLUMNS if label in run]
        lines += [
            f"## {title}",
            "",
            "| " + _line(HEADINGS[label] for label in columns),
            "|---" * len(columns) + "|---|",
        ]
        for row in rows:
            found = [outcomes.get((row.label, column)) for column in columns]
            lines += [_line([_escaped(row.text), *(_in_cell(outcome, notes) for outcome in found)])]
        lines += [""]
    lines += [f"[^{number}]: {_escaped(note)}" for note, number in notes.items()]
    table.page.write_text("\n".join(lines) + "\n")


def read(table: Table) -> dict[Cell, Outcome]:
    """Return the outcome of each cell on the page."""
    text = table.page.read_text()
    notes = {number: _unescaped(note) for number, note in re.findall(r"^\[\^(\d+)\]: (.*)$", text, flags=re.MULTILINE)}
    by_heading = {heading: label for label, heading in HEADINGS.items()}
    outcomes: dict[Cell, Outcome] = {}
    columns: list[str] = []
    for line in re.findall(r"^\| .*$", text, flags=re.MULTILINE):
        first, *words = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if not first:
            columns = [by_heading[word] for word in words]
            continue
        in_bold = re.match(r"\*\*(.*?)\*\*", first)
        for column, cell in zip(columns, words, strict=True):
            word, _, number = cell.partition(" [^")
            if word:
                outcomes[in_bold[1] if in_bold else first, column] = Outcome(word, notes.get(number.rstrip("]"), ""))
    return outcomes


def _in_cell(outcome: Outcome | None, notes: dict[str, int]) -> str:
    """Return the text of a cell. The reason of a refusal is added to `notes` with its number."""
    if outcome is None:
        return ""
    note = f" [^{notes.setdefault(outcome.reason, len(notes) + 1)}]" if outcome.kind == "refused" else ""
    return outcome.word + note


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")


def _unescaped(text: str) -> str:
    return text.replace("\\|", "|")
