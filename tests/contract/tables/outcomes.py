"""Run one cell of a table and judge its outcome."""

import importlib
import io
import json
import logging
import os
import re
import tempfile
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from lightning_paral.diagnostics.rank_pool import RankError, RankPool
from lightning_paral.errors import ParalError
from tests.contract.tables.comparing import Results, differences
from tests.contract.tables.run import Run
from tests.contract.tables.table import Outcome, Row, Table
from tests.contract.user_code.columns import RUNNABLE

IN_MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None
"""Where cells save. On a disk, most of the time of a small save is spent in fsync."""


@dataclass
class Raised:
    """The error that ended a cell on one rank."""

    kind: str
    message: str
    is_ours: bool
    trace: str


def outcome(table: Table, label: str, column: str, pool: RankPool) -> Outcome:
    """Run the cell with the given labels, and its references if no cell of the row has run yet."""
    row = table.rows[label]
    ranks = results(table, row, column, pool)
    if isinstance(ranks, Outcome):
        return ranks
    tolerance = max(row.tolerance, RUNNABLE[column].tolerance)
    found: list[str] = []
    for kind, reference in {"equal": "auto", "as ddp": row.reference}.items():
        expected = expected_of(table, row, reference, pool)
        if isinstance(expected, Outcome):
            found = [f"the reference {expected.kind}: {expected.reason}"]
            continue
        lines = differences(ranks, expected, tolerance)
        found = [line for line in lines if not any(re.search(pattern, line) for pattern in row.apart)]
        if not found:
            return Outcome(kind)
    return Outcome("differs", summary(found))


def results(table: Table, row: Row, column: str, pool: RankPool) -> list[Results] | Outcome:
    """Return the results of each rank in a column or a reference, or the outcome if ranks raised errors."""
    others = RUNNABLE[column].names if column in RUNNABLE else ""
    names = "|".join(filter(None, (row.names, others)))
    with tempfile.TemporaryDirectory(dir=IN_MEMORY, ignore_cleanup_errors=True) as folder:
        arguments = table.package, row.label, column, folder
        try:
            if column == "auto":
                ranks: list[Results | Raised] = [attempt(*arguments, 1)]
            elif column in RUNNABLE and not RUNNABLE[column].on_ranks:
                ranks = [attempt(*arguments, row.num_ranks)]
            else:
                ranks = pool.run(row.num_ranks, attempt, *arguments, row.num_ranks, timeout=row.patience)
        except RankError as error:
            raised = [Raised(**json.loads(path.read_text())) for path in sorted(Path(folder).glob("raised-*.json"))]
            if not raised or not row.of_one_rank:
                return Outcome("hangs", "; ".join(f"{each.kind}: {each.message}" for each in raised) or str(error))
            # The error of another rank may only say that the failed one is gone.
            naming = [each for each in raised if re.search(names, each.message)] or raised
            return judged(names, naming, len(naming), table.clear)
    errors = [rank for rank in ranks if isinstance(rank, Raised)]
    if errors:
        pool.renew_world()
        return judged(names, errors, len(ranks), table.clear)
    return [rank for rank in ranks if isinstance(rank, dict)]


_expected: dict[tuple[str, str, str], list[Results] | Outcome] = {}


def expected_of(table: Table, row: Row, reference: str, pool: RankPool) -> list[Results] | Outcome:
    """Return the results of a reference, which runs once, on each of its ranks, or the outcome if it fails."""
    key = table.package, row.label, reference
    if key not in _expected:
        _expected[key] = results(table, row, reference, pool)
    return _expected[key]


def attempt(package: str, label: str, column: str, folder: str, num_devices: int) -> Results | Raised:
    """Run the row in a column or a reference on this rank; return its results, or the error."""
    row: Row = importlib.import_module(f"{package}.table").TABLE.rows[label]
    known = RUNNABLE.get(column)
    try:
        with _quiet():
            strategy = known.strategy if known else lambda: column
            ranks_per_sample = known.ranks_per_sample if known else 1
            return row.scenario(Run(strategy, Path(folder), num_devices, ranks_per_sample))
    except BaseException as error:
        found = Raised(type(error).__name__, str(error), isinstance(error, ParalError), traceback.format_exc())
        # Another rank may wait for this one until the pool ends it, so the error is also written to a file.
        Path(folder, f"raised-{os.environ.get('RANK', '0')}.json").write_text(json.dumps(asdict(found)))
        if row.of_one_rank:
            raise  # the pool ends the other ranks
        return found


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
        with warnings.catch_warnings(), torch.random.fork_rng(devices=[]), redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        os.environ.clear()
        os.environ.update(environment)  # seed_everything sets variables
        torch.use_deterministic_algorithms(deterministic)
        torch.backends.cudnn.benchmark = benchmark
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def judged(names: str, errors: list[Raised], num_ranks: int, clear: tuple[str, ...]) -> Outcome:
    """Return the outcome of a cell in which ranks raised errors.

    Args:
        names: a regular expression that a refusal must match.
        errors: the errors of the ranks that raised one.
        num_ranks: the number of ranks.
        clear: patterns of messages of libraries that count as refusals.
    """
    # Other ranks may only say that they ended because of the first failure.
    first = next((each for each in errors if each.kind != "RankFailedError"), errors[0])
    said = f"{first.kind}: {first.message}"
    if len(errors) < num_ranks:
        return Outcome("fails", f"on {len(errors)} of {num_ranks} ranks: {said}", first.trace)
    if not first.is_ours and not any(re.search(pattern, first.message) for pattern in clear):
        return Outcome("fails", said, first.trace)
    if not re.search(names, first.message):
        return Outcome("fails", f"does not name {names}: {said}", first.trace)
    line = " ".join(first.message.split())
    return Outcome("refused", re.split(r"(?<=[.:!]) (?=[A-Z])", line)[0], first.trace)


def summary(lines: list[str]) -> str:
    """Return the first line of each kind of difference and the number of further lines."""
    kinds: dict[str, list[str]] = {}
    for line in lines:
        kinds.setdefault(line.split(":")[0] + line.split(":")[1].rstrip("0123456789"), []).append(line)
    return "; ".join(own[0] + (f" (and {len(own) - 1} more)" if len(own) > 1 else "") for own in kinds.values())
