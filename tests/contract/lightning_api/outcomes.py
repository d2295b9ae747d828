"""Run one cell of the table and judge its outcome."""

import io
import json
import logging
import os
import shutil
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import tests.contract.lightning_api.themes  # noqa: F401  registers the rows
from lightning_paral.errors import ParalError
from tests.contract.cases import BY_LABEL
from tests.contract.lightning_api.comparing import differences
from tests.contract.lightning_api.rows import ROWS
from tests.contract.lightning_api.run import Run
from tests.contract.user_code.columns import COLUMNS
from tests.contract.user_code.fitting import Raised
from tests.contract.user_code.outcomes import IN_MEMORY, Outcome, judged, naming_the_cause, summary
from tests.contract.user_code.refusals import CLEAR
from tests.rank_pool import RankError, RankPool

CLEAR_HERE = {
    "The Batch size finder is not supported with distributed strategies": "Lightning",
    "Tuning the batch size is currently not supported with distributed strategies": "Lightning",
    r"`Trainer\(strategy='deepspeed', precision='.*'\)` is not supported": "Lightning",
} | CLEAR
"""Pattern of a message that counts as a refusal -> the library that it comes from."""


def cells() -> list[tuple[str, str]]:
    """Return all cells as labels of row and column, in order."""
    return [
        (row.label, column)
        for row in ROWS.values()
        for column in row.columns
        if BY_LABEL[column].sizes_among(row.num_ranks)
    ]


def attempt(label: str, column: str, folder: str, num_devices: int) -> dict[str, Any] | Raised:
    """Run the row in a column on this rank; return its results, or the error."""
    strategy: Callable[[], Any] = COLUMNS[column].strategy if column in COLUMNS else lambda: column
    try:
        with _quiet():
            return ROWS[label].scenario(Run(strategy, Path(folder), num_devices))
    except BaseException as error:
        found = Raised(type(error).__name__, str(error), isinstance(error, ParalError), traceback.format_exc())
        # Another rank may wait for this one until the pool ends it, so the error is also written to a file.
        Path(folder, f"raised-{os.environ.get('RANK', '0')}.json").write_text(json.dumps(asdict(found)))
        if ROWS[label].of_one_rank:
            raise  # the pool ends the other ranks
        return found


def outcome(label: str, column: str, pool: RankPool) -> Outcome:
    """Run the cell with the given labels, and its references if no cell of the row has run yet."""
    row = ROWS[label]
    with tempfile.TemporaryDirectory(dir=IN_MEMORY) as folder:
        try:
            ranks = _ranks(label, column, folder, pool)
        except RankError as error:
            raised = [Raised(**json.loads(path.read_text())) for path in sorted(Path(folder).glob("raised-*.json"))]
            if raised and row.of_one_rank:
                raised = naming_the_cause(raised, row.names)
                return judged(row.names, raised, len(raised), CLEAR_HERE)
            return Outcome("hangs", "; ".join(f"{each.kind}: {each.message}" for each in raised) or str(error))
    errors = [rank for rank in ranks if isinstance(rank, Raised)]
    if errors:
        pool.renew_world()
        return judged(row.names, errors, len(ranks), CLEAR_HERE)
    results = [rank for rank in ranks if isinstance(rank, dict)]
    tolerance = max(row.tolerance, COLUMNS[column].tolerance)
    found: list[str] = []
    for kind, reference in {"equal": "auto", "as ddp": row.reference}.items():
        expected = expected_of(label, reference, pool)
        if isinstance(expected, Outcome):
            found.append(expected.reason)
            continue
        found = list(differences(results, expected, tolerance))
        if not found:
            return Outcome(kind)
    return Outcome("differs", summary(found))


def _ranks(label: str, column: str, folder: str, pool: RankPool) -> list[dict[str, Any] | Raised]:
    if column == "auto":
        return [attempt(label, column, folder, 1)]
    if column in COLUMNS and not COLUMNS[column].on_ranks:
        return [attempt(label, column, folder, ROWS[label].num_ranks)]
    row = ROWS[label]
    return pool.run(row.num_ranks, attempt, label, column, folder, row.num_ranks, timeout=row.patience)


_expected: dict[tuple[str, str], list[dict[str, Any]] | Outcome] = {}


def expected_of(label: str, reference: str, pool: RankPool) -> list[dict[str, Any]] | Outcome:
    """Return the results of a reference, which runs once, on each of its ranks, or the outcome if it fails."""
    if (label, reference) not in _expected:
        folder = tempfile.mkdtemp(dir=IN_MEMORY)
        try:
            ranks = _ranks(label, reference, folder, pool)
            raised = [rank for rank in ranks if isinstance(rank, Raised)]
            _expected[label, reference] = (
                Outcome("fails", f"the reference: {raised[0].kind}: {raised[0].message}", raised[0].trace)
                if raised
                else [rank for rank in ranks if isinstance(rank, dict)]
            )
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    return _expected[label, reference]


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress output, and restore afterwards what the Trainer sets for the whole process."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric", "lightning_paral")]
    levels = [logger.level for logger in loggers]
    environment = dict(os.environ)
    deterministic, benchmark = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
            warnings.simplefilter("ignore")
            with redirect_stdout(io.StringIO()):
                yield
    finally:
        os.environ.clear()
        os.environ.update(environment)  # seed_everything sets variables
        torch.use_deterministic_algorithms(deterministic)
        torch.backends.cudnn.benchmark = benchmark
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
