"""What people write in modules and callbacks equals one process in a pipeline as well, or is refused."""

from typing import Any

import pytest

from tests.contract.tables.checks import lanes_of
from tests.contract.tables.lanes import Rule
from tests.contract.tables.outcomes import outcome
from tests.contract.user_code.columns import PIPELINE
from tests.contract.user_code.table import TABLE
from tests.rank_pool import RankPool


def rows() -> list[Any]:
    """Return the rows that run under tensor parallelism, which also gives all ranks the same samples."""
    by_cell = lanes_of(TABLE, Rule(engines=("paral_tp",)), columns=("paral_fsdp", "paral_tp"))
    labels = [row.label for row in TABLE.rows.values() if "paral_tp" in row.columns]
    return [pytest.param(row, marks=pytest.mark.lane(by_cell.get((row, "paral_tp"), "default"))) for row in labels]


@pytest.mark.parametrize("row", rows())
def test_user_code_equals_one_process_or_fails(row: str, rank_pool: RankPool) -> None:
    found = outcome(TABLE, row, PIPELINE.label, rank_pool)

    assert found.is_allowed, f"{found.kind}: {found.reason}\n{found.detail}"
