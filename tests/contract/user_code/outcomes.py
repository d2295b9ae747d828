"""Run one cell of the table and judge its outcome."""

import json
import re
import tempfile
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from tests.contract.user_code.columns import COLUMNS, RUNNABLE
from tests.contract.user_code.comparing import differences, mean_metrics
from tests.contract.user_code.fitting import Fit, Raised, attempt, fit, strategy_of
from tests.contract.user_code.refusals import CLEAR
from tests.contract.user_code.rows import ROWS, Row
from tests.rank_pool import RankError, RankPool

IN_MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None
"""Where cells save. On a disk, most of the time of a small save is spent in fsync."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of a cell."""

    kind: str
    """`"equal"`, `"as ddp"` or `"refused"`; for a defect `"differs"`, `"fails"` or `"hangs"`."""
    reason: str = ""
    """The first sentence of a refusal, or a description of the defect."""
    detail: str = ""
    """The traceback of an error."""

    @property
    def is_allowed(self) -> bool:
        """Whether the outcome is not a defect."""
        return self.kind in ("equal", "as ddp", "refused")


def cells() -> list[tuple[str, str]]:
    """Return all cells as labels of row and column, in order."""
    return [(row.label, column) for row in ROWS.values() for column in columns_of(row)]


def columns_of(row: Row) -> list[str]:
    """Return the labels of the columns in which the row runs."""
    return [
        label
        for label, column in COLUMNS.items()
        if label in (row.only or row.strategies)
        or (not row.only and column.always and (not column.themes or row.theme in column.themes))
    ]


def outcome(label: str, column: str, pool: RankPool) -> Outcome:
    """Run the cell with the given labels, and its reference if no cell of the row has run yet."""
    row = ROWS[label]
    with tempfile.TemporaryDirectory(dir=IN_MEMORY) as folder:
        if not RUNNABLE[column].on_ranks:
            ranks: list[Fit | Raised] = [attempt(label, column, folder)]
        else:
            try:
                ranks = pool.run(2, attempt, label, column, folder, timeout=row.patience)
            except RankError as error:
                raised = [Raised(**json.loads(path.read_text())) for path in sorted(Path(folder).glob("raised-*.json"))]
                if raised and row.of_one_rank:
                    raised = naming_the_cause(raised, row.names)
                    return judged(row.names, raised, len(raised))
                said = (f"{each.kind}: {each.message}" for each in raised)
                return Outcome("hangs", "; ".join(said) or str(error))
        errors = [rank for rank in ranks if isinstance(rank, Raised)]
        if errors:
            pool.renew_world()
            return judged(row.names, errors, len(ranks))
        fits = [rank for rank in ranks if isinstance(rank, Fit)]
        tolerance = max(row.tolerance, RUNNABLE[column].tolerance)
        for kind, reference in {"equal": "auto", "as ddp": row.reference}.items():
            try:
                expected = expected_of(label, reference, pool)
            except Exception as error:
                return Outcome("fails", f"the reference does: {type(error).__name__}: {error}", traceback.format_exc())
            found = differences(row, fits, expected, tolerance, buffers_of_all=reference == "auto")
            if not found:
                return Outcome(kind)
        return Outcome("differs", summary(found))


_expected: dict[tuple[str, str], Fit] = {}


def expected_of(label: str, reference: str, pool: RankPool) -> Fit:
    """Return the fit of the reference, which runs once."""
    if (label, reference) not in _expected:
        with tempfile.TemporaryDirectory(dir=IN_MEMORY) as folder:
            if reference == "auto":
                found = fit(label, strategy_of(reference), folder, 1)
            else:
                found = joined(pool.run(2, attempt, label, reference, folder, timeout=ROWS[label].patience))
        _expected[label, reference] = found
    return _expected[label, reference]


def joined(ranks: list[Fit | Raised]) -> Fit:
    """Return rank 0's fit with the mean losses and metrics of all ranks."""
    fits = [rank for rank in ranks if isinstance(rank, Fit)]
    assert len(fits) == len(ranks), ranks
    fits[0].losses = torch.tensor([rank.losses for rank in fits]).mean(dim=0).tolist()
    fits[0].metrics = mean_metrics(fits)
    fits[0].seen_by_rank = [rank.seen for rank in fits]
    return fits[0]


def naming_the_cause(raised: list[Raised], names: str) -> list[Raised]:
    """Return the errors that match `names`, or all if none does.

    If one rank fails, the error of another may only say that it is gone.
    """
    return [each for each in raised if re.search(names, each.message)] or raised


def judged(names: str, errors: list[Raised], num_ranks: int, clear: Iterable[str] = CLEAR) -> Outcome:
    """Return the outcome of a cell in which ranks raised errors.

    Args:
        names: a regular expression that a refusal must match.
        errors: the errors of the ranks that raised one.
        num_ranks: the number of ranks.
        clear: patterns of messages of libraries that count as refusals.
    """
    # Other ranks may only say that they ended because of the first failure.
    first = next((each for each in errors if each.kind != "RankFailedError"), errors[0])
    if len(errors) < num_ranks:
        return Outcome("fails", f"on {len(errors)} of {num_ranks} ranks: {first.kind}: {first.message}", first.trace)
    if not first.is_ours and not any(re.search(pattern, first.message) for pattern in clear):
        return Outcome("fails", f"{first.kind}: {first.message}", first.trace)
    if names and not re.search(names, first.message):
        return Outcome("fails", f"does not name {names}: {first.kind}: {first.message}", first.trace)
    return Outcome("refused", first_sentence(first.message), first.trace)


def summary(lines: list[str]) -> str:
    """Return the first line of each kind of difference and the number of further lines."""
    kinds: dict[str, list[str]] = {}
    for line in lines:
        kinds.setdefault(line.split(":")[0] + line.split(":")[1].rstrip("0123456789"), []).append(line)
    shown = [own[0] + (f" (and {len(own) - 1} more)" if len(own) > 1 else "") for own in kinds.values()]
    return "; ".join(shown)


def first_sentence(message: str) -> str:
    """Return the first sentence of a message, on one line."""
    line = " ".join(message.split())
    return re.split(r"(?<=[.:!]) (?=[A-Z])", line)[0]
