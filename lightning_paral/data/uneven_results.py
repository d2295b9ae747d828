"""Join the values logged with `self.log` in evaluation, even if some ranks had fewer samples or none."""

from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_paral.compat.lightning.metrics import mark_updated, set_computed
from lightning_paral.compat.lightning.results import Metadata, ResultMetric, make_sync
from lightning_paral.data.logged_agreement import LoggedHistory
from lightning_paral.data.logged_keys import synchronizes
from lightning_paral.data.weighted_results import MeanOfRank, WeightedResults, are_constant
from lightning_paral.distributed.mesh import ParallelDims

_META_FIELDS = ("fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph", "add_dataloader_idx")


@dataclass(frozen=True)
class _Entry:
    """The values that a rank logged under one key, as it sends them to the other ranks."""

    key: str
    logged: dict[str, Any]
    reduction: str
    dataloader_idx: int | None
    metric_attribute: str | None
    sync: bool
    rank_zero_only: bool
    """Whether the other ranks do without the value. All ranks compute a metric that synchronizes."""
    value: Tensor | None
    """The sum, minimum or maximum of the logged values over this rank's batches, on CPU; `None` for a metric."""
    num_samples: float
    """The sum of the batch sizes."""
    mean: MeanOfRank | None
    """What the rank knows about the batch sizes of a mean."""


class UnevenResults(WeightedResults):
    """Lightning's results, joined in one exchange at the end of a loader, even if ranks logged different keys.

    Lightning reduces key by key. A rank without a batch has no keys, so the other ranks would wait for it.
    """

    def __init__(self, dims: ParallelDims, history: LoggedHistory) -> None:
        super().__init__(dims, history, training=False)
        self.weight = 1.0
        """The number of this rank's samples in this step, divided by the mean number of all data ranks."""
        self.shows_constants = False
        """Whether this or an earlier step had more samples than there are data ranks."""
        self.found_metrics: list[Any] | None = None
        """The metrics found in the module and the callbacks, until the end of the loader."""

    def weight_of(self, hook: str) -> float:
        """Return `weight`."""
        return self.weight

    def step_shows_constants(self) -> bool:
        """Return `shows_constants`."""
        return self.shows_constants

    def exchange(self, module: LightningModule) -> None:
        """Reduce the values logged per epoch over all data ranks. *Collective* over the data ranks."""
        entries = [self._make_entry(key, metric) for key, metric in self.valid_items() if metric.meta.on_epoch]
        self._batch_sizes.clear()
        self.found_metrics = None
        by_rank = [{entry.key: entry for entry in theirs} for theirs in self.dims.data_rank_group().gather(entries)]
        for key in dict.fromkeys(key for by_key in by_rank for key in by_key):
            self._join(key, [by_key.get(key) for by_key in by_rank], module)

    def _make_entry(self, key: str, metric: ResultMetric) -> _Entry:
        meta = metric.meta
        is_collective = not metric.is_tensor and synchronizes(metric.value, self.dims)
        is_mean = metric.is_tensor and meta.is_mean_reduction
        return _Entry(
            key=key,
            logged={name: getattr(meta, name) for name in _META_FIELDS},
            reduction=meta.reduce_fx.__name__,
            dataloader_idx=meta.dataloader_idx,
            metric_attribute=meta.metric_attribute,
            sync=meta.sync.should,
            rank_zero_only=meta.sync.rank_zero_only and not is_collective,
            value=metric.value.detach().cpu() if metric.is_tensor else None,
            num_samples=float(metric.cumulated_batch_size) if is_mean else 0.0,
            mean=self.mean_of(key) if is_mean else None,
        )

    def _join(self, key: str, entries: list[_Entry | None], module: LightningModule) -> None:
        present = [entry for entry in entries if entry is not None]
        entry = present[0]
        metric = self.get(key)
        if metric is None or metric.has_reset:
            if entry.rank_zero_only:
                return
            metric = self[key] = self._result_like(entry, module, metric)
            if not entry.sync and entry.value is not None:
                # The value is not synchronized and this rank has none, but callbacks that monitor it need one.
                set_computed(metric, _reduce([entry]).to(module.device))
        self[key] = self.pop(key)  # computing a metric is collective, so keys need the same order on all ranks
        if entry.value is None or not entry.sync or entry.rank_zero_only:
            return
        group = metric.meta.sync.group
        ranks = self.dims.data_ranks if group is None else dist.get_process_group_ranks(group)
        if self.dims.rank in ranks:
            by_rank = dict(zip(self.dims.data_ranks, entries, strict=True))
            reduced = _reduce([each for rank in ranks if (each := by_rank.get(rank)) is not None])
            set_computed(metric, reduced.to(module.device))

    def _result_like(self, entry: _Entry, module: LightningModule, metric: ResultMetric | None) -> ResultMetric:
        """Return the result that this rank would have if it had logged the values of `entry`."""
        if metric is None:
            logged = entry.logged | {"reduce_fx": entry.reduction, "dataloader_idx": entry.dataloader_idx}
            meta = Metadata(**logged, metric_attribute=entry.metric_attribute)
            meta.sync = make_sync(self.reduce_for(entry.key, module.trainer.strategy.reduce), should=entry.sync)
            metric = ResultMetric(meta, is_tensor=entry.value is not None)
        if entry.value is None:
            assert entry.metric_attribute is not None
            metric.value = attrgetter(entry.metric_attribute)(module)
            set_computed(metric, None)
        mark_updated(metric)  # prevents a warning: updates of other ranks will be merged into it
        metric.has_reset = False
        return metric


def _reduce(entries: list[_Entry]) -> Tensor:
    values = torch.stack([entry.value for entry in entries if entry.value is not None])
    reduction = entries[0].reduction
    if reduction in ("max", "min"):
        extreme: Tensor = getattr(torch, reduction)(values)
        return extreme
    total = values.double().sum()
    if reduction == "mean":
        num_samples = sum(entry.num_samples for entry in entries)
        means = [entry.mean for entry in entries if entry.mean is not None]
        if are_constant(means):
            total = total + sum(mean.missing_value.double() for mean in means)
            num_samples += sum(mean.missing_size for mean in means)
        total = total / num_samples
    return total.to(values.dtype)
