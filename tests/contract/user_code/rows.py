"""The rows of the table: code that people write in LightningModules and callbacks."""

import inspect
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule

from tests.contract.tables.table import Row
from tests.contract.user_code.columns import COLUMNS
from tests.contract.user_code.fitting import Fit

ROWS: dict[str, Row] = {}


def add(label: str, sentence: str, module: Callable[[], LightningModule], **options: Any) -> None:
    """Register a row.

    Args:
        label: a unique, short name.
        sentence: a sentence for the page that says what the user writes.
        module: a function that returns the module.
        **options: fields of `Fit` and of `Row`, and:
            strategies: further columns, besides those in which every row runs.
            only: the only columns in which the row runs.
    """
    _register(label, sentence, sys._getframe(1).f_code.co_filename, module, options)


def row(label: str, sentence: str = "", **options: Any) -> Callable[[Any], Any]:
    """Register the decorated module as a row, as `add` does; its docstring is the sentence, unless one is given."""
    file = sys._getframe(1).f_code.co_filename

    def register(module: Any) -> Any:
        _register(label, sentence or " ".join((inspect.getdoc(module) or "").split()), file, module, options)
        return module

    return register


def _register(label: str, sentence: str, file: str, module: Any, options: dict[str, Any]) -> None:
    assert sentence, label
    assert label not in ROWS, label
    assert "|" not in label, label
    theme = Path(file).stem
    of_fit = {field.name for field in fields(Fit)}
    fit = Fit(module=module, **{name: value for name, value in options.items() if name in of_fit})
    more = {name: value for name, value in options.items() if name not in of_fit}
    columns = _columns(theme, more.pop("strategies", ()), more.pop("only", ()))
    text = f"**{label}**{' *(resumed)*' if fit.resumed else ''}: {sentence}"
    ROWS[label] = Row(label=label, text=text, theme=theme, scenario=fit, columns=columns, **more)


def _columns(theme: str, further: tuple[str, ...], only: tuple[str, ...]) -> tuple[str, ...]:
    always = [label for label, column in COLUMNS.items() if column.always and theme in (column.themes or (theme,))]
    return tuple(label for label in COLUMNS if label in (only or (*always, *further)))
