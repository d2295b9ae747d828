"""`check` says of a row of each theme of the table of user code what the table says."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from lightning_paral.diagnostics.check_compare import Checks
from lightning_paral.diagnostics.check_run import Fit, Task
from tests.contract.tables import page
from tests.contract.user_code import fitting
from tests.contract.user_code.columns import COLUMNS
from tests.contract.user_code.table import TABLE

SAID = page.read(TABLE)
AGREES = {"equal": ("equal",), "as ddp": ("equal", "differs"), "refused": ("refused", "fails")}
"""Word of the page -> outcomes of the check. Errors of torch and Lightning are refusals in the table only."""


def cells() -> Iterator[Any]:
    """Yield the cells of the first row of each theme that fits a module and compares everything."""
    themes = set()
    for row in TABLE.rows.values():
        is_whole = isinstance(row.scenario, fitting.Fit) and not row.scenario.trainer and not row.apart
        if is_whole and row.theme not in themes:
            themes.add(row.theme)
            for column in ("paral_ddp", "paral_fsdp", "paral_zero3"):
                if column in row.columns:
                    yield row.label, column


def project(label: str) -> Fit:
    fit: Any = TABLE.rows[label].scenario
    loaders = fit.loaders(dist.get_rank(), dist.get_world_size())
    data = loaders["train_dataloaders"], loaders.get("val_dataloaders")
    return Fit(module=fit.module(), data=data, trainer={"callbacks": fit.callbacks()})


@pytest.mark.parametrize(("label", "column"), cells())
def test_check_agrees_with_the_table(rank_pool, tmp_path: Path, label: str, column: str) -> None:
    task = Task(steps=8, folder=tmp_path, seed=3, keep_dropout=True)
    row = Checks(partial(project, label), task, rank_pool).row(column, COLUMNS[column].strategy, 2, saves=False)

    assert row.outcome in AGREES[SAID[label, column].kind], row
