"""The values logged with `self.log`, in which each sample counts once, whatever ranks have how many samples."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.nn import Module, SyncBatchNorm
from torchmetrics import Metric

from lightning_paral.compat.lightning.results import (
    Metadata,
    ResultCollection,
    ResultMetric,
    make_sync,
    mark_updated,
    set_computed,
)
from lightning_paral.data.division import Mark
from lightning_paral.data.logged_keys import (
    METRIC,
    CheckedReduce,
    DeviceFlag,
    LoggedHistory,
    check_same_keys,
    spans_data_ranks,
)
from lightning_paral.data.metrics import change_updates, metrics_of_run
from lightning_paral.distributed.mesh import ParallelDims
from lightning_paral.errors import ConfigurationError

EVEN = Mark()
_OUTSIDE_OF_STEPS = ("on_train_start", "on_train_epoch_start", "on_train_epoch_end")
_NEUTRAL = {"mean": 0.0, "sum": 0.0, "max": -torch.inf, "min": torch.inf}
_META_FIELDS = ("fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph", "add_dataloader_idx")


@dataclass(frozen=True, kw_only=True)
class _Mean:
    """What a rank tells the others about the batch sizes with which it logged a mean in an epoch.

    A batch size that the user passes to `self.log` may be the number of this rank's samples or tokens: over all ranks
    these numbers add up to that of one process. Or it may be a constant, such as the batch size of the loader, which
    one process passes as well: it has to be divided among the ranks like the samples. Only a comparison of what the
    ranks have logged tells which of the two it is.
    """

    size: float
    """The sum of the batch sizes."""
    constant: float | None
    """The batch size, if it was the same in all steps."""
    exceeds_ranks: bool
    """Whether the number of the rank's samples was not 1 in all steps, so that a batch size of 1 is a constant."""
    missing_value: Tensor
    """What the sum of values times batch sizes lacks if the batch size is a constant, on the CPU."""
    missing_size: float
    """What `size` lacks if the batch size is a constant."""


class _BatchSizes:
    """The batch sizes with which a key was logged in uneven steps."""

    def __init__(self) -> None:
        self._missing_value: Tensor | float = 0.0
        self._missing_size = 0.0
        self._sizes: set[float] = set()  # at most two
        self._exceeds_ranks = False
        self._num_without_sample = 0

    def add(self, value: Tensor, batch_size: int, mark: Mark) -> None:
        size = float(batch_size)
        if len(self._sizes) < 2:
            self._sizes.add(size)
        self._exceeds_ranks |= mark.exceeds_ranks
        if mark.is_padding:
            self._num_without_sample += 1
        else:
            missing = size * mark.weight - size
            self._missing_value = self._missing_value + value.detach().double() * missing
            self._missing_size += missing

    def mean_of(self, metric: ResultMetric) -> _Mean:
        """Return what other ranks need to know. `metric` has all values that were logged in the epoch."""
        num_counted = metric.update_count - self._num_without_sample
        total = float(metric.cumulated_batch_size)
        size = max(self._sizes) if self._sizes else total / max(1, num_counted)
        is_constant = len(self._sizes) <= 1 and total == size * num_counted
        return _Mean(
            size=total,
            constant=size if is_constant else None,
            exceeds_ranks=self._exceeds_ranks,
            missing_value=torch.as_tensor(self._missing_value).cpu(),
            missing_size=self._missing_size,
        )


@dataclass(frozen=True, kw_only=True)
class _Entry:
    """The values that a rank logged under one key in an epoch, as it sends them to the other ranks."""

    key: str
    logged: dict[str, Any]
    reduction: str
    dataloader_idx: int | None
    metric_attribute: str | None
    sync: bool
    is_reduced: bool
    """Whether the value of the epoch is computed by all data ranks together."""
    rank_zero_only: bool
    """Whether the other ranks do without the value. All ranks compute a metric that synchronizes."""
    value: Tensor | None
    """The sum, minimum or maximum of the logged values over this rank's batches, on CPU; `None` for a metric."""
    mean: _Mean | None


class SharedResults(ResultCollection):
    """Lightning's results, in which each sample counts once, with each key reduced by its `CheckedReduce`.

    In an *uneven step* the ranks have different numbers of samples. Values that are synchronized are then weighted by
    these numbers. At the end of an epoch all values are joined in one exchange.

    Args:
        dims: the parallel dimensions.
        history: remembers what this rank has reduced.
        training: whether these are the results of training, in which all ranks must log the same keys.
    """

    mark = EVEN
    """The mark of the current step."""
    rank_local = False
    """Whether a rank may have no batch in this step. If so, values that are synchronized per step stay local."""

    def __init__(self, dims: ParallelDims, history: LoggedHistory, *, training: bool) -> None:
        self.dims = dims
        self.history = history
        self._differs = DeviceFlag()
        self._reduces: dict[tuple[str, Any], CheckedReduce] = {}
        self._batch_sizes: dict[str, _BatchSizes] = {}
        super().__init__(training)

    def mark_of(self, hook: str) -> Mark:
        """Return the mark of the step in which a hook logs."""
        return self.mark

    def log(self, fx: str, name: str, value: Any, *args: Any, sync_dist_fn: Any = None, **options: Any) -> None:
        """Log a value, as in Lightning."""
        if sync_dist_fn is not None:
            with_index = options.get("add_dataloader_idx", True) and self.dataloader_idx is not None
            key = f"{fx}.{name}.{self.dataloader_idx}" if with_index else f"{fx}.{name}"
            options["sync_dist_fn"] = self._reduce_for(key, sync_dist_fn)
        super().log(fx, name, value, *args, **options)

    def _reduce_for(self, key: str, reduce: Callable[..., Any]) -> CheckedReduce:
        """Return the function that reduces the values of `key`, the same object each time, as Lightning requires."""
        entry = (key, getattr(reduce, "__self__", reduce))
        if entry not in self._reduces:
            self._reduces[entry] = CheckedReduce(key, reduce, self.dims, self.history, self._differs)
        return self._reduces[entry]

    def update_metrics(self, key: str, value: Any, batch_size: int) -> None:
        """Add a value to those logged under `key`, weighted in an uneven step."""
        metric = self[key]
        meta, sync = metric.meta, metric.meta.sync
        mark = self.mark_of(meta.fx)
        is_weighted = mark.weight != 1.0 and metric.is_tensor and sync.should and not sync.rank_zero_only
        if is_weighted:
            if not value.is_floating_point():
                value = value.to(torch.promote_types(torch.get_default_dtype(), torch.float32))
            if meta.on_epoch and meta.is_mean_reduction:
                self._batch_sizes.setdefault(key, _BatchSizes()).add(value, batch_size, mark)
            if mark.is_padding:
                value, batch_size = torch.full_like(value, _NEUTRAL[meta.reduce_fx.__name__]), 0
        with ExitStack() as undo:
            if self.rank_local and sync.should:
                undo.callback(setattr, sync, "should", True)
                sync.should = False
            elif is_weighted:
                assert isinstance(sync.fn, CheckedReduce)
                undo.callback(setattr, sync.fn, "weight", 1.0)
                sync.fn.weight = mark.weight
            super().update_metrics(key, value, batch_size)

    def metrics(self, on_step: bool) -> Any:
        """Return the values for callbacks, loggers and the progress bar."""
        values = super().metrics(on_step)
        if self._differs.read(wait=not on_step):
            raise self.history.error("synchronized a value", self.dims)
        return values

    def join(self, module: LightningModule) -> None:
        """Join the values of the epoch over all data ranks, even if some had no batch. *Collective* over these ranks.

        Lightning reduces key by key. A rank without a batch has no keys, so the other ranks would wait for it.

        Raises:
            ConfigurationError: in training, the keys differ. The message names keys and ranks.
        """
        entries = [self._entry(key, metric) for key, metric in self.valid_items() if metric.meta.on_epoch]
        self._batch_sizes.clear()
        gathered = self.dims.data_rank_group().gather(entries)
        if self.training:
            names = [
                [f"{METRIC if each.value is None else ''}{each.key!r}" for each in theirs if each.is_reduced]
                for theirs in gathered
            ]
            check_same_keys(dict(zip(self.dims.data_ranks, names, strict=True)))
        by_rank = [{entry.key: entry for entry in theirs} for theirs in gathered]
        for key in dict.fromkeys(key for by_key in by_rank for key in by_key):
            self._join(key, [by_key.get(key) for by_key in by_rank], module)

    def _entry(self, key: str, metric: ResultMetric) -> _Entry:
        meta, sync = metric.meta, metric.meta.sync
        is_collective = not metric.is_tensor and _synchronizes(metric.value, self.dims)
        is_mean = metric.is_tensor and meta.is_mean_reduction
        is_reduced = sync.should and not sync.rank_zero_only and spans_data_ranks(sync.group, self.dims)
        return _Entry(
            key=key,
            logged={name: getattr(meta, name) for name in _META_FIELDS},
            reduction=meta.reduce_fx.__name__,
            dataloader_idx=meta.dataloader_idx,
            metric_attribute=meta.metric_attribute,
            sync=sync.should,
            is_reduced=is_reduced if metric.is_tensor else is_collective,
            rank_zero_only=sync.rank_zero_only and not is_collective,
            value=metric.value.detach().cpu() if metric.is_tensor else None,
            mean=self._batch_sizes.get(key, _BatchSizes()).mean_of(metric) if is_mean else None,
        )

    def _join(self, key: str, entries: list[_Entry | None], module: LightningModule) -> None:
        entry = next(each for each in entries if each is not None)
        metric = self.get(key)
        if metric is None or metric.has_reset:
            if entry.rank_zero_only or self.training:
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
            meta.sync = make_sync(self._reduce_for(entry.key, module.trainer.strategy.reduce), should=entry.sync)
            metric = ResultMetric(meta, is_tensor=entry.value is not None)
        if entry.value is None:
            assert entry.metric_attribute is not None
            metric.value = attrgetter(entry.metric_attribute)(module)
            set_computed(metric, None)
        mark_updated(metric)  # prevents a warning: updates of other ranks will be merged into it
        metric.has_reset = False
        return metric


def _synchronizes(metric: Metric, dims: ParallelDims) -> bool:
    """Return whether `compute` of `metric` is collective over the data ranks."""
    parts = [part for part in metric.modules() if isinstance(part, Metric)]
    # Wrappers and compositions of metrics gather nothing themselves.
    with_states = [part for part in parts if part.metric_state] or parts
    return any(part.sync_on_compute and spans_data_ranks(part.process_group, dims) for part in with_states)


def _reduce(entries: list[_Entry]) -> Tensor:
    values = torch.stack([entry.value for entry in entries if entry.value is not None])
    reduction = entries[0].reduction
    if reduction in ("max", "min"):
        extreme: Tensor = getattr(torch, reduction)(values)
        return extreme
    total, means = values.double().sum(), [entry.mean for entry in entries if entry.mean is not None]
    if reduction == "mean":
        size = sum(mean.size for mean in means)
        if _are_constant(means):
            total = total + sum(mean.missing_value.double() for mean in means)
            size += sum(mean.missing_size for mean in means)
        total = total / size
    return total.to(values.dtype)


def _are_constant(means: list[_Mean]) -> bool:
    """Return whether all ranks logged with the same batch size, which is not their number of samples."""
    constant = means[0].constant
    if constant is None or any(each.constant != constant for each in means):
        return False
    return constant != 1.0 or any(each.exceeds_ranks for each in means)


class TrainingResults(SharedResults):
    """Lightning's results of training. The repeated sample of a rank that has none of its own counts nowhere.

    Args:
        trainer: the Trainer.
        dims: the parallel dimensions.
        current_mark: a function that returns how the batch of the current step is divided.
        history: remembers what this rank has reduced.
    """

    def __init__(
        self, trainer: Trainer, dims: ParallelDims, current_mark: Callable[[], Mark], history: LoggedHistory
    ) -> None:
        self._trainer = trainer
        self._current_mark = current_mark
        self._batch: Any = None
        self._step: ExitStack | None = None
        self._metrics: list[Any] | None = None  # found in this epoch
        self._num_updates: dict[str, int] = {}  # of the logged metrics, while hooks at the end of the epoch run
        super().__init__(dims, history, training=True)

    @property
    def batch(self) -> Any:
        """The current batch. Lightning sets it when a batch begins, and to `None` when its last hook has ended."""
        return self._batch

    @batch.setter
    def batch(self, batch: Any) -> None:
        self._batch = batch
        self.end_step()
        if batch is None:
            return
        loop = self._trainer.fit_loop.epoch_loop
        self.history.where = f"training batch {loop.batch_idx} of epoch {self._trainer.current_epoch}"
        mark = self._current_mark()
        if mark.weight != 1.0:
            if mark.some_have_none:
                _reject_sync_batch_norm(self._trainer.lightning_module)
            if self._metrics is None or mark.is_padding:
                self._metrics = metrics_of_run(self._trainer)
            self._step = ExitStack()
            change_updates(self._metrics, mark.weight, self._step)

    def end_step(self) -> None:
        """End an uneven step: metrics count what they are updated with."""
        if self._step is not None:
            step, self._step = self._step, None
            step.close()

    def mark_of(self, hook: str) -> Mark:
        """Return the mark of the step in which a hook logs."""
        return EVEN if hook in _OUTSIDE_OF_STEPS else self._current_mark()

    @contextmanager
    def ending_epoch(self) -> Iterator[None]:
        """Compute the values of the epoch on all ranks; then, run the hooks of its end. *Collective* over data ranks.

        Otherwise the progress bar, and hooks of some ranks that read them, would compute them before the other ranks.

        Raises:
            ConfigurationError: the ranks have logged different keys, or a hook updates a metric that was logged before.
        """
        self.end_step()
        self._metrics = None
        self.history.where = f"the hooks at the end of epoch {self._trainer.current_epoch}"
        self.join(self._trainer.lightning_module)
        self.metrics(on_step=False)
        self._num_updates = {key: each.value.update_count for key, each in self.valid_items() if not each.is_tensor}
        try:
            yield
        finally:
            self._num_updates = {}

    def metrics(self, on_step: bool) -> Any:
        """Return the values for callbacks, loggers and the progress bar."""
        for key, count in {} if on_step else self._num_updates.items():
            if key in self and not self[key].has_reset and self[key].value.update_count > count:
                fx, name = key.split(".", 1)
                raise ConfigurationError(
                    f"The metric {name!r} was logged in {fx}, and then updated in a hook at the end of the epoch. With "
                    "several ranks, its value is computed before these hooks. Log it in on_train_epoch_end, after the "
                    "update, instead."
                )
        return super().metrics(on_step)


def _reject_sync_batch_norm(module: Module) -> None:
    """Raise a `ConfigurationError` if the repeated sample would change the activations of other ranks."""
    name = next((name for name, part in module.named_modules() if isinstance(part, SyncBatchNorm)), None)
    if name is not None:
        raise ConfigurationError(
            f"A batch has fewer samples than there are ranks, and {name} is a SyncBatchNorm. A sample that a rank "
            "repeats, because it has none of its own, would change the statistics of all ranks, and with them the "
            "gradient. Set drop_last=True in the loader, or leave out sync_batchnorm=True."
        )
