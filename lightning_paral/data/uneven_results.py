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
from lightning_paral.data.batch_sizes import BatchSizes, Summary, are_constant
from lightning_paral.data.logged_keys import CheckedResults, weighted
from lightning_paral.data.logged_steps import LoggedSteps
from lightning_paral.data.same_keys import synchronizes
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
    sizes: Summary | None
    """What the rank knows about the batch sizes of a mean."""
    missing_value: Tensor
    """What `value` lacks if the batch size is a constant."""
    missing_size: float
    """What `num_samples` lacks if the batch size is a constant."""


class UnevenResults(CheckedResults):
    """Lightning's results, joined in one exchange at the end of a loader, even if ranks logged different keys.

    Lightning reduces key by key. A rank without a batch has no keys, so the other ranks would wait for it.
    """

    def __init__(self, dims: ParallelDims, steps: LoggedSteps | None = None) -> None:
        super().__init__(dims, training=False, steps=steps)
        self.weight = 1.0
        """The number of this rank's samples in this step, divided by the mean number of all data ranks."""
        self.shows_constants = False
        """As in `BatchSizes.add`."""
        self.found_metrics: list[Any] | None = None
        """The metrics found in the module and the callbacks, until the end of the loader."""
        self._batch_sizes: dict[str, BatchSizes] = {}
        self.rank_local = False
        """Whether a rank may have no batch in this step. If so, values that are synchronized per step stay local."""

    def update_metrics(self, key: str, value: Any, batch_size: int) -> None:
        """Add a value to those logged under `key`."""
        metric = self[key]
        meta, sync = metric.meta, metric.meta.sync
        if self.weight != 1.0 and metric.is_tensor and sync.should and not sync.rank_zero_only:
            if meta.on_epoch and meta.is_mean_reduction:
                self._batch_sizes.setdefault(key, BatchSizes()).add(
                    value, batch_size, self.weight, self.shows_constants
                )
            if not self.rank_local:
                with weighted(sync, self.weight):
                    super().update_metrics(key, value, batch_size)
                return
        if not (self.rank_local and sync.should):
            super().update_metrics(key, value, batch_size)
            return
        sync.should = False
        try:
            super().update_metrics(key, value, batch_size)
        finally:
            sync.should = True

    def exchange(self, module: LightningModule) -> None:
        """Reduce the values logged per epoch over all data ranks. *Collective* over the data ranks."""
        entries = [
            _make_entry(key, metric, self._batch_sizes.get(key, BatchSizes()), self.dims)
            for key, metric in self.valid_items()
            if metric.meta.on_epoch
        ]
        self._batch_sizes.clear()
        self.found_metrics = None
        by_rank = [{entry.key: entry for entry in theirs} for theirs in self.dims.data_rank_group().gather(entries)]
        for key in dict.fromkeys(key for by_key in by_rank for key in by_key):
            self._join(key, [by_key.get(key) for by_key in by_rank], module)

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


def _make_entry(key: str, metric: ResultMetric, batch_sizes: BatchSizes, dims: ParallelDims) -> _Entry:
    meta = metric.meta
    is_collective = not metric.is_tensor and synchronizes(metric.value, dims)
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
        sizes=batch_sizes.summary(metric) if is_mean else None,
        missing_value=torch.as_tensor(batch_sizes.value).cpu(),
        missing_size=float(batch_sizes.size),
    )


def _reduce(entries: list[_Entry]) -> Tensor:
    values = torch.stack([entry.value for entry in entries if entry.value is not None])
    reduction = entries[0].reduction
    if reduction in ("max", "min"):
        extreme: Tensor = getattr(torch, reduction)(values)
        return extreme
    total = values.double().sum()
    if reduction == "mean":
        num_samples = sum(entry.num_samples for entry in entries)
        if are_constant([entry.sizes for entry in entries if entry.sizes is not None]):
            total = total + sum(entry.missing_value.double() for entry in entries)
            num_samples += sum(entry.missing_size for entry in entries)
        total = total / num_samples
    return total.to(values.dtype)
