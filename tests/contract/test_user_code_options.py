"""What options of a strategy change in the outcomes of the rows that concern them, and that others change nothing."""

import re

import pytest

from tests.contract.tables import page
from tests.contract.tables.outcomes import outcome
from tests.contract.user_code.table import TABLE
from tests.rank_pool import RankPool

FREEZING = "^freezing during|^freezing and unfreezing in turns$|^unfreezing by hand|^unfreezing, optimizer"
USED = "^parameters used in (some|early)|^parameters unused"
AS_BY_DEFAULT = {
    "ddp_static_graph": ("paral_ddp", FREEZING),
    "ddp_checkpointing": ("paral_ddp", FREEZING),
    "fsdp_linear": ("paral_fsdp", f"{FREEZING}|target .* in on_train_batch_end|trained .* in training_step"),
    "fsdp_unsharded": ("paral_fsdp", "^gradient hook of a parameter"),
}
"""Options -> the column that has the same outcomes, and a pattern of the rows."""
CHANGED = {
    ("ddp_find_unused", f"{USED}|^optimizers, several: (Toggled|Plain|Adding|Wasserstein|ActorCritic)"): "equal",
    ("fsdp_filters", "^parameters that are complex"): "equal",
    **{(f"zero{stage}_find_unused", USED): "equal" for stage in (1, 2, 3)},
    **{(f"zero{stage}_find_unused", "^parameters used now and then"): "refused" for stage in (1, 2, 3)},
}
"""Options and a pattern of the rows -> the outcome."""
SAID = page.read(TABLE)
CELLS = [
    (row.label, options, SAID[row.label, column].kind)
    for options, (column, pattern) in AS_BY_DEFAULT.items()
    for row in TABLE.rows.values()
    if re.search(pattern, row.label) and column in row.columns
] + [
    (row.label, options, word)
    for (options, pattern), word in CHANGED.items()
    for row in TABLE.rows.values()
    if re.search(pattern, row.label)
]


@pytest.mark.parametrize(("row", "options", "expected"), CELLS)
def test_outcome_with_options(row: str, options: str, expected: str, rank_pool: RankPool) -> None:
    found = outcome(TABLE, row, options, rank_pool)

    assert found.word == expected, f"{found.reason}\n{found.detail}"
