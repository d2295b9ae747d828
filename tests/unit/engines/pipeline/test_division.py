"""Units are divided so that the largest stage is as small as possible."""

from itertools import combinations

import pytest

from lightning_paral.engines.pipeline.division import balanced


def sums(costs: list[float], parts: list[range]) -> list[float]:
    return [sum(costs[number] for number in part) for part in parts]


@pytest.mark.parametrize(
    "costs", [[1, 1, 1, 1], [5, 1, 1, 1, 1, 1], [1, 1, 1, 9], [2, 7, 1, 8, 2, 8, 1], [0, 0, 0, 3], [4]], ids=str
)
@pytest.mark.parametrize("num_parts", [1, 2, 3, 4])
def test_largest_part_is_the_smallest_possible(costs: list[float], num_parts: int) -> None:
    if num_parts > len(costs):
        return
    parts = balanced(costs, num_parts)

    assert [number for part in parts for number in part] == list(range(len(costs)))
    assert all(parts)
    divisions = [
        [range(start, stop) for start, stop in zip([0, *cuts], [*cuts, len(costs)], strict=True)]
        for cuts in combinations(range(1, len(costs)), num_parts - 1)
    ]
    assert max(sums(costs, parts)) == min(max(sums(costs, each)) for each in divisions)


def test_first_parts_are_the_longer_ones() -> None:
    assert balanced([1] * 5, 2) == [range(3), range(3, 5)]
