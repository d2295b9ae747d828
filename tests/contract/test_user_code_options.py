"""What options of a strategy change in the outcomes of the rows that concern them, and that others change nothing."""

import re
from collections.abc import Iterator
from typing import Any

import pytest

from lightning_paral.diagnostics.rank_pool import RankPool
from tests.contract.tables import page
from tests.contract.tables.outcomes import outcome
from tests.contract.user_code.columns import COLUMNS
from tests.contract.user_code.table import TABLE

FREEZING = "^freezing during|^freezing and unfreezing in turns$|^unfreezing by hand|^unfreezing, optimizer"
USED = "^parameters used in (some|early)|^parameters unused"
EXPECTED = {
    ("ddp_static_graph", FREEZING): "paral_ddp",
    ("ddp_checkpointing", FREEZING): "paral_ddp",
    ("fsdp_linear", f"{FREEZING}|target .* in on_train_batch_end|trained .* in training_step"): "paral_fsdp",
    ("fsdp_unsharded", "^gradient hook of a parameter"): "paral_fsdp",
    ("ddp_find_unused", f"{USED}|^optimizers, several: (Toggled|Plain|Wasserstein|ActorCritic)"): "equal",
    ("fsdp_filters", "^parameters that are complex"): "equal",
}
"""Options and a pattern of the rows -> the outcome, or the column that has the same outcomes."""
SAID = page.read(TABLE)


def cells() -> Iterator[Any]:
    """Yield the cells of each entry, of which the first is in the default lane."""
    for (options, pattern), as_in in EXPECTED.items():
        lane = "default"
        for row in TABLE.rows.values():
            if re.search(pattern, row.label) and (as_in not in COLUMNS or as_in in row.columns):
                expected = SAID[row.label, as_in].kind if as_in in COLUMNS else as_in
                yield pytest.param(row.label, options, expected, marks=pytest.mark.lane(lane))
                lane = "full"


@pytest.mark.parametrize(("row", "options", "expected"), cells())
def test_outcome_with_options(row: str, options: str, expected: str, rank_pool: RankPool) -> None:
    found = outcome(TABLE, row, options, rank_pool)

    assert found.word == expected, f"{found.reason}\n{found.detail}"
