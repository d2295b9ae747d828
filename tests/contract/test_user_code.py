"""Everything that people write in modules and callbacks equals one process under every strategy, or is refused."""

import pytest

from lightning_paral.diagnostics.rank_pool import RankPool
from tests.contract.tables.checks import assert_as_on_page, assert_complete, parameters
from tests.contract.user_code.table import TABLE


@pytest.mark.parametrize(("row", "column"), parameters(TABLE))
def test_user_code_equals_one_process_or_is_refused(row: str, column: str, rank_pool: RankPool) -> None:
    assert_as_on_page(TABLE, row, column, rank_pool)


def test_table_has_every_cell() -> None:
    assert_complete(TABLE)
