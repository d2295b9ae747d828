"""What people write in modules and callbacks equals one process in a pipeline as well, or is refused."""

import pytest

import tests.contract.user_code.themes  # noqa: F401  registers the rows
from tests.contract.user_code.columns import PIPELINE
from tests.contract.user_code.outcomes import columns_of, outcome
from tests.contract.user_code.rows import ROWS
from tests.rank_pool import RankPool


@pytest.mark.parametrize("row", [row.label for row in ROWS.values() if "paral_tp" in columns_of(row)])
def test_user_code_equals_one_process_or_fails(row: str, rank_pool: RankPool) -> None:
    found = outcome(row, PIPELINE.label, rank_pool)

    assert found.is_allowed, f"{found.kind}: {found.reason}\n{found.detail}"
