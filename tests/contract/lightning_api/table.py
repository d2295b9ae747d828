"""Write and read docs/lightning.md, the table with the expected outcome of every cell."""

import re
from pathlib import Path

from tests.contract.lightning_api.rows import DOCUMENTED, ROWS
from tests.contract.user_code.outcomes import Outcome
from tests.contract.user_code.table import in_cell

PATH = Path(__file__).parents[3] / "docs" / "lightning.md"
TITLES = {
    "arguments": "Arguments of the Trainer",
    "running": "Running: fit, validate, test, predict, resume",
    "callbacks": "Callbacks",
    "checkpoints": "Callbacks that save",
    "loggers": "Loggers and profilers",
    "tuning": "Tuner",
    "modules": "LightningModule",
    "hooks": "Hooks",
    "data": "Data",
}
INTRODUCTION = """\
# What of Lightning works under which strategy

Each row is a public feature of Lightning, each column a strategy, on two ranks or two devices unless the row says
otherwise. A cell says what comes of it:

- **equal**: losses, weights, metrics, files, and whatever else the feature produces are those of one process with the
  same global batches, up to rounding.
- **as ddp**: they are those of Lightning's `ddp` on two ranks, because one process gives another result, or none.
- **refused**: an error says what is not possible; the footnote has its first sentence.
- **open**: none of these, which is a defect.

An empty cell is not run. For `paral_zero1` and `paral_zero3` the feature does not depend on the stage, and is as under
`paral_zero2`; for `paral_dp`, which is one process, the feature is about ranks. Loggers that need other packages are
not run: a strategy treats them all alike. `docs/user-code.md` is about what people write in modules and callbacks.

`tests/contract/test_lightning_api.py` runs every cell. `python -m tests.contract.lightning_api --write` writes this
page.
"""


def write(outcomes: dict[tuple[str, str], Outcome]) -> None:
    """Write the page from the outcomes of all cells."""
    notes: dict[str, int] = {}
    lines = [INTRODUCTION]
    for theme, title in TITLES.items():
        lines += [f"## {title}", "", "| | " + " | ".join(f"`{label}`" for label in DOCUMENTED) + " |"]
        lines += ["|---" * (len(DOCUMENTED) + 1) + "|"]
        for row in ROWS.values():
            if row.theme == theme:
                words = [in_cell(outcomes.get((row.label, column)), notes) for column in DOCUMENTED]
                lines += [f"| {row.label} | " + " | ".join(words) + " |"]
        lines += [""]
    lines += [f"[^{number}]: {note}" for note, number in notes.items()]
    PATH.parent.mkdir(exist_ok=True)
    PATH.write_text("\n".join(lines) + "\n")


def read() -> dict[tuple[str, str], tuple[str, str]]:
    """Return for each cell on the page its outcome and the text of its footnote."""
    text = PATH.read_text()
    notes = dict(re.findall(r"^\[\^(\d+)\]: (.*)$", text, flags=re.MULTILINE))
    said: dict[tuple[str, str], tuple[str, str]] = {}
    for line in text.splitlines():
        if not line.startswith("| ") or line.startswith("| |"):
            continue
        label, *words = [cell.strip() for cell in line.split("|")[1:-1]]
        for column, cell in zip(DOCUMENTED, words, strict=True):
            if cell:
                word, _, number = cell.partition(" [^")
                said[label, column] = (word, notes.get(number.rstrip("]"), ""))
    return said
