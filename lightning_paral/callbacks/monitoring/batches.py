"""The number of samples in a batch."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

_DEPTH = 4


def count_samples(batch: Any, depth: int = _DEPTH) -> int:
    """Return the size of the first dimension of the first tensor in `batch`; 0 if there is none.

    Args:
        batch: a tensor, or nested lists, tuples and mappings, as a loader yields them.
        depth: how deeply to search nested collections.
    """
    if isinstance(batch, Tensor):
        return batch.shape[0] if batch.ndim else 1
    if depth == 0 or isinstance(batch, str | bytes):
        return 0
    if isinstance(batch, Mapping):
        batch = batch.values()
    elif isinstance(batch, Sequence):
        if batch and isinstance(batch[0], str):
            return len(batch)
    else:
        batch = getattr(batch, "__dict__", {}).values()
    return next(filter(None, (count_samples(each, depth - 1) for each in batch)), 0)
