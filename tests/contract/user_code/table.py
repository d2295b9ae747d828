"""Write and read docs/user-code.md, the table with the expected outcome of every cell."""

import re
from pathlib import Path

from tests.contract.user_code.columns import COLUMNS
from tests.contract.user_code.outcomes import Outcome, columns_of
from tests.contract.user_code.rows import ROWS

PATH = Path(__file__).parents[3] / "docs" / "user-code.md"
TITLES = {
    "updates": "Target networks and averages",
    "trained": "Trained parameters written by hand",
    "values": "Values of weights in hooks",
    "gradients": "Gradients",
    "derivatives": "Derivatives that a step computes",
    "optimizers": "Optimizers",
    "steps": "Backward passes and steps by hand",
    "buffers": "Buffers and attributes",
    "freezing": "Freezing, unfreezing, replacing",
    "modules": "Modules",
    "networks": "Whole networks, several optimizers, precision",
    "chains": "Blocks in a chain",
    "logs": "Logging, metrics, callbacks",
    "loops": "Loaders, schedulers, loops",
    "pruning": "Pruning, parametrizations, averaging",
    "saving": "Saving and resuming",
    "reports": "From public reports",
}
INTRODUCTION = """\
# What may stand in a module or a callback

Each row is something that people write, each column a strategy, at two ranks or two devices. A cell says what comes of
it:

- **equal**: losses, weights, buffers, logged metrics, what hooks read, and the checkpoint, optimizer included, are
  those of one process with the same global batches, up to rounding.
- **as ddp**: they are those of Lightning's `ddp` at two ranks. This concerns what a rank computes from its own samples
  and is no mean over samples, as the statistics of BatchNorm.
- **refused**: an error says so and names what it is about; the footnote has its first sentence.
- **open**: neither, which is a defect.

An empty cell is not run: the code asks for something of other strategies, as `torch.distributed` does in `paral_dp`,
which is one process.

`paral_zero3` is run with `stage3_param_persistence_threshold=0`, so that all parameters are partitioned; "defaults"
leaves those below 100,000 elements whole. Rows marked *resumed* save after an epoch, load into a new module and go on.

Under `paral_tp`, two tensor ranks split even the smallest layers. Under `paral_pp`, two stages divide each batch into
two micro-batches.

`tests/contract/test_user_code.py` runs every cell. `python -m tests.contract.user_code --write` writes this page.
"""
SHORT = {"paral_zero3_whole": "`paral_zero3`, defaults"}
OPEN, NOT_RUN = "open", ""


def write(outcomes: dict[tuple[str, str], Outcome]) -> None:
    """Write the page from the outcomes of all cells."""
    notes: dict[str, int] = {}
    themes: dict[str, list[str]] = {theme: [] for theme in TITLES}
    for row in ROWS.values():
        themes[row.theme].append(row.label)
    lines = [INTRODUCTION]
    for theme, labels in themes.items():
        documented = [label for label, column in COLUMNS.items() if column.documented]
        columns = [label for label in documented if any(label in columns_of(ROWS[row]) for row in labels)]
        lines += [f"## {TITLES[theme]}", ""]
        lines += ["| | " + " | ".join(SHORT.get(label, f"`{label}`") for label in columns) + " |"]
        lines += ["|---" * (len(columns) + 1) + "|"]
        for label in labels:
            row = ROWS[label]
            words = [in_cell(outcomes.get((label, column)), notes) for column in columns]
            resumed = " *(resumed)*" if row.resumed else ""
            lines += [f"| **{label}**{resumed}: {_escaped(row.sentence)} | " + " | ".join(words) + " |"]
        lines += [""]
    lines += [f"[^{number}]: {_escaped(note)}" for note, number in notes.items()]
    PATH.parent.mkdir(exist_ok=True)
    PATH.write_text("\n".join(lines) + "\n")


def read() -> dict[tuple[str, str], tuple[str, str]]:
    """Return for each cell on the page its outcome and the text of its footnote."""
    text = PATH.read_text()
    notes = dict(re.findall(r"^\[\^(\d+)\]: (.*)$", text, flags=re.MULTILINE))
    by_heading = {SHORT.get(label, f"`{label}`"): label for label in COLUMNS}
    said: dict[tuple[str, str], tuple[str, str]] = {}
    columns: list[str] = []
    for line in text.splitlines():
        if not line.startswith("|") or line.startswith("|---"):
            continue
        first, *words = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if not first:
            columns = [by_heading[word] for word in words]
            continue
        found = re.match(r"\*\*(.*?)\*\*", first)
        assert found, line
        for column, cell in zip(columns, words, strict=True):
            if cell:
                word, _, number = cell.partition(" [^")
                said[found[1], column] = (word, notes.get(number.rstrip("]"), ""))
    return said


def word(outcome: Outcome) -> str:
    """Return the word of the page for an outcome."""
    return outcome.kind if outcome.is_allowed else OPEN


def in_cell(outcome: Outcome | None, notes: dict[str, int]) -> str:
    """Return the text of a cell. The reason of a refusal is added to `notes` with its number."""
    if outcome is None:
        return NOT_RUN
    note = f" [^{notes.setdefault(outcome.reason, len(notes) + 1)}]" if outcome.kind == "refused" else ""
    return word(outcome) + note


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")
