"""Names of ranks in messages."""

import pytest

from lightning_paral.distributed.rank_names import name_ranks


@pytest.mark.parametrize(
    ("ranks", "name"),
    [
        ((1,), "rank 1"),
        ((0, 2), "ranks 0, 2"),
        ((0, 1), "ranks 0, 1"),
        ((0, 2, 3, 4), "ranks 0, 2 to 4"),
        (range(1000), "ranks 0 to 999"),
        (range(0, 40, 2), "ranks 0, 2, 4, 6, 8, 10, 12, 14, ... (20 ranks)"),
    ],
)
def test_ranks_are_named_in_few_words(ranks: tuple[int, ...], name: str) -> None:
    assert name_ranks(ranks) == name
