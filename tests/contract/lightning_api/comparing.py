"""Compare the results of a cell's ranks with those of one process, or of the ranks of Lightning's `ddp`."""

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from tests.contract.lightning_api.run import Mean, OfRankZero
from tests.contract.user_code.comparing import compared


def differences(ranks: list[dict[str, Any]], expected: list[dict[str, Any]], tolerance: float) -> Iterator[str]:
    """Yield a line for each difference.

    Args:
        ranks: the results of each rank of the cell.
        expected: the expected results of each rank, or of one process, with which each rank is compared.
        tolerance: the largest difference: relative, and absolute below 1.
    """
    for name in ranks[0].keys() | expected[0].keys():
        if name not in ranks[0] or name not in expected[0]:
            yield f"{name}: is {'missing' if name not in ranks[0] else 'extra'}"
            continue
        first = ranks[0][name]
        if isinstance(first, Mean):
            ours, theirs = (mean([rank[name].value for rank in side]) for side in (ranks, expected))
            yield from compared(name, ours, theirs, tolerance * 10)
        elif isinstance(first, OfRankZero):
            yield from compared(name, first.value, expected[0][name].value, tolerance)
        else:
            for number, rank in enumerate(ranks):
                other = expected[number if len(expected) > 1 else 0][name]
                yield from compared(f"rank {number}: {name}", rank[name], other, tolerance)


def mean(values: list[Any]) -> Any:
    """Return the mean of nested numbers, value by value, or rank 0's if their structures differ."""
    flat = [tree_flatten(value) for value in values]
    _, spec = flat[0]
    if any(other != spec for _, other in flat):
        return values[0]
    by_leaf = zip(*(others for others, _ in flat), strict=True)
    means = [sum(torch.as_tensor(each, dtype=torch.float64) for each in leaf) / len(flat) for leaf in by_leaf]
    return tree_unflatten(means, spec)
