"""The rows of the table: code that people write in LightningModules and callbacks."""

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule

from tests.contract.user_code.models import Loaders, regression


@dataclass(frozen=True)
class Row:
    """A piece of user code, which is fitted under every strategy."""

    label: str
    """A unique, short name."""
    sentence: str
    """A sentence for the page that says what the user writes."""
    theme: str
    """The name of the file that has the row."""
    module: Callable[[], LightningModule]
    """A function that returns the module. It is called after the seed is set."""
    callbacks: Callable[[], list[Callback]] = list
    """A function that returns the user's callbacks."""
    trainer: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the Trainer, which trains for one epoch by default."""
    loaders: Loaders = regression
    """A function of rank and number of ranks that returns the loaders for `fit`."""
    resumed: bool = False
    """Whether the run is interrupted: fit one epoch, save, resume with a new module, and fit the second epoch. The
    reference fits both epochs at once."""
    strategies: tuple[str, ...] = ()
    """Further columns, besides those in which every row runs."""
    reference: str = "auto"
    """The alternative to one process. `"ddp"`: the cell may equal Lightning's DDP at the same world size, if the code
    computes a value from a rank's own samples that is not a mean over samples, as BatchNorm does."""
    tolerance: float = 1e-5
    """The largest difference: relative, and absolute below 1."""
    names: str = ""
    """A regular expression that the message of a refusal must match."""
    patience: float = 150.0
    """Seconds after which a cell counts as hanging."""
    of_one_rank: bool = False
    """Whether only one rank raises the error, and the launcher ends the others, as for any exception."""
    only: tuple[str, ...] = ()
    """The only columns in which the row runs; if empty, it runs in all."""
    since: str = ""
    """The first version of torch with the outcomes of the page. With earlier ones, cells need only be allowed."""
    apart: tuple[str, ...] = ()
    """Patterns of names in the `state_dict` and metrics that are not compared, such as those drawn at random."""


ROWS: dict[str, Row] = {}


def add(label: str, sentence: str, module: Callable[[], LightningModule], **options: Any) -> None:
    """Register a row."""
    _register(label, sentence, sys._getframe(1).f_code.co_filename, module, options)


def row(label: str, sentence: str = "", **options: Any) -> Callable[[Any], Any]:
    """Register the decorated module as a row; its docstring is the sentence, unless one is given."""
    file = sys._getframe(1).f_code.co_filename

    def register(module: Any) -> Any:
        _register(label, sentence or " ".join((inspect.getdoc(module) or "").split()), file, module, options)
        return module

    return register


def _register(label: str, sentence: str, file: str, module: Any, options: dict[str, Any]) -> None:
    assert sentence, label
    assert label not in ROWS, label
    assert "|" not in label, label
    ROWS[label] = Row(label, sentence, Path(file).stem, module, **options)
