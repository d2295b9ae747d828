"""A row of the contract: something that people write in LightningModules and callbacks."""

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
    """One case, fitted under every strategy."""

    label: str
    """Its name, unique and short: `theme/case`."""
    sentence: str
    """What the user writes."""
    theme: str
    """The file it is in."""
    module: Callable[[], LightningModule]
    """Makes the module, after the seed is set."""
    callbacks: Callable[[], list[Callback]] = list
    """Makes the user's callbacks."""
    trainer: dict[str, Any] = field(default_factory=dict)
    """What else the Trainer gets. One epoch, unless it says otherwise."""
    loaders: Loaders = regression
    """Makes what `fit` gets, for a rank of a world."""
    resumed: bool = False
    """Fit one epoch and save, then load into a new module and fit the second: compared with two epochs in one go."""
    strategies: tuple[str, ...] = ()
    """Columns beyond those in which every row runs."""
    reference: str = "auto"
    """What it may equal beside one process: `"ddp"`, Lightning's DDP at the same world size, where the user's code
    computes something from a rank's own samples that is no mean over samples (BatchNorm)."""
    tolerance: float = 1e-5
    names: str = ""
    """What a refusal has to name, as a regular expression."""
    patience: float = 150.0
    """Seconds after which a cell counts as hanging; less where one is known to."""
    of_one_rank: bool = False
    """The error is one rank's own: whatever started the ranks ends the others, as for any exception."""
    only: tuple[str, ...] = ()
    """The columns in which it runs, if not in all."""
    apart: tuple[str, ...] = ()
    """Patterns of names in the `state_dict` and metrics that differ by intent: drawn at random, say."""


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
