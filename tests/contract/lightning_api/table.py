"""The table of Lightning's public features."""

from importlib import import_module
from pathlib import Path

from tests.contract.lightning_api.rows import ALL, ROWS
from tests.contract.tables.table import Table
from tests.contract.user_code.table import CLEAR

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
for _theme in sorted(TITLES):
    import_module(f"tests.contract.lightning_api.{_theme}")  # registers its rows

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

`tests/contract/test_lightning_api.py` runs the cells. `python -m tests.contract.lightning_api --write` writes this
page; with `--only-new` it runs only cells that are not on it.
"""
TABLE = Table(
    package="tests.contract.lightning_api",
    rows=ROWS,
    page=Path(__file__).parents[3] / "docs" / "lightning.md",
    introduction=INTRODUCTION,
    titles=TITLES,
    clear=(
        *CLEAR,
        "The Batch size finder is not supported with distributed strategies",
        "does not support `accumulate_grad_batches` changing",
        "Tuning the batch size is currently not supported with distributed strategies",
        r"`Trainer\(strategy='deepspeed', precision='.*'\)` is not supported",
    ),
    engines=ALL,
)
