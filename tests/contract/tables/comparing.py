"""Compare the results of a cell's ranks with those of one process, or of the ranks of Lightning's `ddp`."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from tests.contract.tables.run import Mean, OfEach, OfRankZero

Results = dict[str, Any]


def differences(ranks: list[Results], expected: list[Results], tolerance: float) -> Iterator[str]:
    """Yield a line for each difference.

    Args:
        ranks: the results of each rank of the cell.
        expected: the expected results of each rank, or of one process, with which each rank is compared.
        tolerance: the largest difference: relative, and absolute below 1. Means, and what hooks have seen, may differ
            by ten times as much.
    """
    for name in ranks[0].keys() | expected[0].keys():
        if name not in ranks[0] or name not in expected[0]:
            yield f"{name}: is {'missing' if name not in ranks[0] else 'extra'}"
            continue
        ours, theirs = [rank[name] for rank in ranks], [rank[name] for rank in expected]
        if isinstance(ours[0], Mean):
            sides = [mean([each.value for each in side]) for side in (ours, theirs)]
            yield from compared(name, *sides, tolerance * 10)
        elif isinstance(ours[0], OfRankZero) or (isinstance(ours[0], OfEach) and len(theirs) > 1):
            yield from compared(name, ours[0].value, theirs[0].value, tolerance)
        else:
            for number, value in enumerate(ours):
                other = theirs[number if len(theirs) > 1 else 0]
                allowed = tolerance * 10 if name == "seen" else tolerance
                yield from compared(f"rank {number}: {name}", value, other, allowed)


def mean(values: list[Any]) -> Any:
    """Return the mean of nested numbers; in dicts, of those that have the key. Lists of several lengths are kept."""
    first = values[0]
    if isinstance(first, dict):
        return {key: mean([value[key] for value in values if key in value]) for key in first}
    if isinstance(first, list | tuple):
        same = len({len(value) for value in values}) == 1
        return [mean(list(each)) for each in zip(*values, strict=True)] if same else values
    return sum(torch.as_tensor(value, dtype=torch.float64) for value in values) / len(values)


def compared(where: str, ours: Any, theirs: Any, tolerance: float) -> Iterator[str]:
    """Yield a line for each value in which two nested containers differ."""
    if isinstance(theirs, OfEach) and isinstance(ours, OfEach):
        ours, theirs = ours.value, theirs.value
    if isinstance(theirs, list | tuple) and isinstance(ours, list | tuple):
        if len(ours) != len(theirs):
            yield f"{where}: {len(ours)} items, expected {len(theirs)}"
            return
        ours, theirs = dict(enumerate(ours)), dict(enumerate(theirs))
    if isinstance(theirs, dict) and isinstance(ours, dict):
        for key in ours.keys() | theirs.keys():
            if key not in ours or key not in theirs:
                yield f"{where}: {key} is {'missing' if key not in ours else 'extra'}"
            else:
                yield from compared(f"{where}: {key}", ours[key], theirs[key], tolerance)
    elif isinstance(theirs, int | float | Tensor) and isinstance(ours, int | float | Tensor):
        # Complex, so that numbers of all types are compared in one way.
        mine, other = (torch.as_tensor(each).to(torch.complex128) for each in (ours, theirs))
        if mine.shape != other.shape:
            yield f"{where}: shape {tuple(mine.shape)}, expected {tuple(other.shape)}"
            return
        allowed = tolerance * other.abs().clamp(min=1.0)
        bad = ~torch.isclose(mine, other, rtol=0.0, atol=0.0, equal_nan=True) & ~((mine - other).abs() <= allowed)
        if bad.any():
            yield f"{where}: off by {(mine - other)[bad].abs().max().item():.2g}"
    elif ours != theirs:
        yield f"{where}: {ours!r}, expected {theirs!r}"
