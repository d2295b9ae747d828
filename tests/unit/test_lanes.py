"""The lists in tests/lanes.py name tests that exist."""

from pathlib import Path

import pytest

from tests.lanes import ONE_SET, SLOW

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("prefix", sorted({*SLOW, *ONE_SET}))
def test_prefix_of_ids_matches_a_test(prefix: str) -> None:
    path, _, function = prefix.partition("::")

    assert (ROOT / path).is_dir() if path.endswith("/") else (ROOT / path).is_file()
    assert not function or f"def {function}" in (ROOT / path).read_text()
