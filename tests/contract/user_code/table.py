"""The table of user code."""

from importlib import import_module
from pathlib import Path

from tests.contract.tables.table import Table
from tests.contract.user_code.rows import ROWS

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
for _theme in sorted(TITLES):
    import_module(f"tests.contract.user_code.{_theme}")  # registers its rows

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

Under `paral_tp`, two tensor ranks split each layer whose features they divide. Under `paral_pp`, two stages divide each
batch into two micro-batches.

`tests/contract/test_user_code.py` runs the cells. `python -m tests.contract.user_code --write` writes this page; with
`--only-new` it runs only cells that are not on it.
"""
CLEAR = (
    "\ntorch: ",  # explained by this package
    r"of stage \d+, a tensor of which this rank holds only a shard",  # in an error of load_state_dict
    "to use it with forward mode AD",  # from torch, about DeepSpeed's functions
    "The Finetuning callback does not support running with the DeepSpeed strategy",  # from Lightning
)
TABLE = Table(
    package="tests.contract.user_code",
    rows=ROWS,
    page=Path(__file__).parents[3] / "docs" / "user-code.md",
    introduction=INTRODUCTION,
    titles=TITLES,
    clear=CLEAR,
    engines=(
        "paral_dp",
        "paral_ddp",
        "paral_fsdp",
        "paral_zero1",
        "paral_zero2",
        "paral_zero3",
        "paral_tp",
        "paral_pp",
    ),
)
