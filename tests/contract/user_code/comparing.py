"""Compare the fits of a strategy's ranks with the reference."""

import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from tests.contract.user_code.fitting import Fit
from tests.contract.user_code.rows import Row


def differences(row: Row, ranks: list[Fit], expected: Fit, tolerance: float, *, buffers_of_all: bool) -> list[str]:
    """Return a line for each difference.

    With `buffers_of_all=False`, only rank 0's buffers are compared, which are the saved ones.
    """
    return [line for line in _differences(ranks, expected, tolerance, buffers_of_all) if not _apart(row, line)]


def _apart(row: Row, line: str) -> bool:
    return any(re.search(pattern, line) for pattern in row.apart)


def _differences(ranks: list[Fit], expected: Fit, tolerance: float, buffers_of_all: bool) -> Iterator[str]:
    if len({len(rank.losses) for rank in ranks}) > 1:
        yield f"losses: {[len(rank.losses) for rank in ranks]} of them"
    else:
        losses = torch.tensor([rank.losses for rank in ranks]).mean(dim=0)
        yield from compared("losses", losses, torch.tensor(expected.losses), tolerance * 10)
    for number, rank in enumerate(ranks):
        # Under DDP each rank has its own buffers, and rank 0's are saved.
        weights = {k: v for k, v in rank.weights.items() if buffers_of_all or not number or k not in rank.buffers}
        theirs = {k: v for k, v in expected.weights.items() if k in weights or k not in rank.buffers}
        yield from compared(f"rank {number}: weights", weights, theirs, tolerance)
        seen = expected.seen_by_rank[number] if expected.seen_by_rank else expected.seen
        yield from compared(f"rank {number}: seen", rank.seen, seen, tolerance * 10)
        yield from compared(f"rank {number}: groups", rank.hyperparameters, expected.hyperparameters, tolerance)
    yield from compared("metrics", mean_metrics(ranks), expected.metrics, tolerance * 10)
    yield from compared("checkpoint", ranks[0].checkpoint, expected.checkpoint, tolerance)


def mean_metrics(ranks: list[Fit]) -> dict[str, float]:
    """Return for each metric of rank 0 its mean over the ranks that logged it."""
    means = {}
    for key in ranks[0].metrics:
        values = [rank.metrics[key] for rank in ranks if key in rank.metrics]
        means[key] = sum(values) / len(values)
    return means


def compared(where: str, ours: Any, theirs: Any, tolerance: float) -> Iterator[str]:
    """Yield a line for each value in which two nested containers differ."""
    if isinstance(theirs, Tensor) and isinstance(ours, Tensor):
        yield from _tensors(where, ours, theirs, tolerance)
    elif isinstance(theirs, dict) and isinstance(ours, dict):
        for key in ours.keys() | theirs.keys():
            if key not in ours or key not in theirs:
                yield f"{where}: {key} is {'missing' if key not in ours else 'extra'}"
            else:
                yield from compared(f"{where}: {key}", ours[key], theirs[key], tolerance)
    elif isinstance(theirs, list | tuple) and isinstance(ours, list | tuple):
        if len(ours) != len(theirs):
            yield f"{where}: {len(ours)} items, expected {len(theirs)}"
            return
        for index, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
            yield from compared(f"{where}: {index}", mine, other, tolerance)
    elif isinstance(theirs, int | float | Tensor) and isinstance(ours, int | float | Tensor):
        yield from _tensors(where, torch.as_tensor(ours), torch.as_tensor(theirs), tolerance)
    elif ours != theirs:
        yield f"{where}: {ours!r}, expected {theirs!r}"


def _tensors(where: str, ours: Tensor, theirs: Tensor, tolerance: float) -> Iterator[str]:
    if ours.shape != theirs.shape:
        yield f"{where}: shape {tuple(ours.shape)}, expected {tuple(theirs.shape)}"
        return
    if theirs.is_complex():
        ours, theirs = torch.view_as_real(ours), torch.view_as_real(theirs)
    ours, theirs = ours.double(), theirs.double()
    same = (ours == theirs) | (ours.isnan() & theirs.isnan())
    if not same.all():
        off = (ours - theirs).abs()
        bad = ~same & ~(off <= tolerance * theirs.abs().clamp(min=1.0))
        if bad.any():
            yield f"{where}: off by {off[bad].max().item():.2g}"
