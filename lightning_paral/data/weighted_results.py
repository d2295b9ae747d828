"""Weight logged values in steps in which ranks have different numbers of samples, so that each sample counts once."""

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_paral.compat.lightning.results import ResultMetric
from lightning_paral.data.logged_agreement import LoggedHistory
from lightning_paral.data.logged_keys import CheckedReduce, CheckedResults
from lightning_paral.distributed.mesh import ParallelDims

_NEUTRAL = {"mean": 0.0, "sum": 0.0, "max": -torch.inf, "min": torch.inf}


@dataclass(frozen=True, kw_only=True)
class MeanOfRank:
    """What a rank tells the others about the batch sizes with which it logged a mean in an epoch.

    A batch size that the user passes to `self.log` may be the number of this rank's samples or tokens: over all ranks
    these numbers add up to that of one process. Or it may be a constant, such as the batch size of the loader, which
    one process passes as well: it has to be divided among the ranks like the samples. Only a comparison of what the
    ranks have logged tells which of the two it is.
    """

    constant: float | None
    """The batch size, if it was the same in all steps."""
    shows_constants: bool
    """Whether the number of the rank's samples was not 1 in all steps, so that a batch size of 1 is a constant."""
    missing_value: Tensor
    """What the sum of values times batch sizes lacks if the batch size is a constant, on the CPU."""
    missing_size: float
    """What the sum of batch sizes lacks if the batch size is a constant."""


def are_constant(means: list[MeanOfRank]) -> bool:
    """Return whether all ranks logged with the same batch size, which is not their number of samples."""
    constant = means[0].constant
    if constant is None or any(each.constant != constant for each in means):
        return False
    return constant != 1.0 or any(each.shows_constants for each in means)


class _BatchSizes:
    """The batch sizes with which a key was logged in uneven steps."""

    def __init__(self) -> None:
        self._missing_value: Tensor | float = 0.0
        self._missing_size = 0.0
        self._sizes: set[float] = set()  # at most two
        self._shows_constants = False
        self._num_without_sample = 0

    def add(self, value: Tensor, batch_size: int, weight: float, shows_constants: bool) -> None:
        size = float(batch_size)
        if len(self._sizes) < 2:
            self._sizes.add(size)
        self._shows_constants |= shows_constants
        if weight:
            missing = size * weight - size
            self._missing_value = self._missing_value + value.detach().double() * missing
            self._missing_size += missing
        else:
            self._num_without_sample += 1

    def mean_of(self, metric: ResultMetric) -> MeanOfRank:
        """Return what other ranks need to know. `metric` has all values that were logged in the epoch."""
        num_counted = metric.update_count - self._num_without_sample
        total = float(metric.cumulated_batch_size)
        size = max(self._sizes) if self._sizes else total / max(1, num_counted)
        is_constant = len(self._sizes) <= 1 and total == size * num_counted
        return MeanOfRank(
            constant=size if is_constant else None,
            shows_constants=self._shows_constants,
            missing_value=torch.as_tensor(self._missing_value).cpu(),
            missing_size=self._missing_size,
        )


class WeightedResults(CheckedResults):
    """Lightning's results, in which each sample counts once.

    In an *uneven step* the ranks have different numbers of samples. Values that are synchronized are then weighted by
    these numbers. In other steps, and for values that stay local, results are those of `CheckedResults`.
    """

    rank_local = False
    """Whether a rank may have no batch in this step. If so, values that are synchronized per step stay local."""

    def __init__(self, dims: ParallelDims, history: LoggedHistory, *, training: bool) -> None:
        self._batch_sizes: dict[str, _BatchSizes] = {}
        super().__init__(dims, history, training=training)

    def weight_of(self, hook: str) -> float:
        """Return the number of this rank's samples, divided by the mean number of all data ranks, in a hook.

        It is 1.0 on all ranks or on none, and 0.0 on a rank that repeats a sample of another rank.
        """
        raise NotImplementedError

    def step_shows_constants(self) -> bool:
        """Return whether this or an earlier step had more samples than there are data ranks."""
        raise NotImplementedError

    def update_metrics(self, key: str, value: Any, batch_size: int) -> None:
        """Add a value to those logged under `key`, weighted in an uneven step."""
        metric = self[key]
        meta, sync = metric.meta, metric.meta.sync
        weight = self.weight_of(meta.fx)
        is_weighted = weight != 1.0 and metric.is_tensor and sync.should and not sync.rank_zero_only
        if is_weighted:
            if not value.is_floating_point():
                value = value.to(torch.promote_types(torch.get_default_dtype(), torch.float32))
            if meta.on_epoch and meta.is_mean_reduction:
                sizes = self._batch_sizes.setdefault(key, _BatchSizes())
                sizes.add(value, batch_size, weight, self.step_shows_constants())
            if not weight:
                value, batch_size = torch.full_like(value, _NEUTRAL[meta.reduce_fx.__name__]), 0
        with ExitStack() as undo:
            if self.rank_local and sync.should:
                undo.callback(setattr, sync, "should", True)
                sync.should = False
            elif is_weighted:
                assert isinstance(sync.fn, CheckedReduce)
                undo.callback(setattr, sync.fn, "weight", 1.0)
                sync.fn.weight = weight
            super().update_metrics(key, value, batch_size)

    def mean_of(self, key: str) -> MeanOfRank:
        """Return what this rank tells the others about the mean that it logged under `key`."""
        return self._batch_sizes.get(key, _BatchSizes()).mean_of(self[key])
