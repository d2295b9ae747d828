"""Everything that people write in modules and callbacks equals one process under every strategy, or is refused."""

import pytest
import torch
from packaging.version import Version

import tests.contract.user_code.themes  # noqa: F401  registers the rows
from tests.contract.user_code import table
from tests.contract.user_code.columns import COLUMNS
from tests.contract.user_code.outcomes import cells, outcome
from tests.contract.user_code.rows import ROWS
from tests.rank_pool import RankPool

ADVICE = "If this is intended, write docs/user-code.md again: python -m tests.contract.user_code --write"


def parameters(needs_operators: bool) -> list[object]:
    return [(row, column) for row, column in cells() if COLUMNS[column].needs_operators == needs_operators]


@pytest.fixture(scope="module")
def said() -> dict[tuple[str, str], tuple[str, str]]:
    return table.read()


def assert_as_said(cell: tuple[str, str], said: dict[tuple[str, str], tuple[str, str]], pool: RankPool) -> None:
    found = outcome(*cell, pool)
    assert found.is_allowed, f"{found.kind}: {found.reason}\n{found.detail}"
    is_earlier = Version(torch.__version__).release < Version(ROWS[cell[0]].since or "0").release
    if is_earlier or not COLUMNS[cell[1]].documented:
        return
    word, note = said[cell]
    assert table.word(found) == word, f"{found.reason}\n{ADVICE}"
    assert found.reason == note, ADVICE


@pytest.mark.parametrize(("row", "column"), parameters(needs_operators=False))
def test_user_code_equals_one_process_or_is_refused(row: str, column: str, said, rank_pool: RankPool) -> None:
    assert_as_said((row, column), said, rank_pool)


@pytest.mark.usefixtures("deepspeed_operators")
@pytest.mark.parametrize(("row", "column"), parameters(needs_operators=True))
def test_user_code_with_offload_equals_one_process_or_is_refused(
    row: str, column: str, said, rank_pool: RankPool
) -> None:
    assert_as_said((row, column), said, rank_pool)


def test_table_has_every_cell(said) -> None:
    assert said.keys() == {(row, column) for row, column in cells() if COLUMNS[column].documented}
    assert table.OPEN not in {word for word, _ in said.values()}
