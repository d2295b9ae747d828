"""The values logged with `self.log`, in which each sample counts once, whatever ranks have how many samples.

All ranks must log the same keys with `sync_dist=True`, which the collectives check that reduce the values anyway.
"""

import copy
import json
import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import timedelta
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.nn import Module, SyncBatchNorm
from torchmetrics import Metric

from lightning_paral.compat.lightning.loops import set_results
from lightning_paral.compat.lightning.methods import shadow_method
from lightning_paral.compat.lightning.results import (
    ResultCollection,
    ResultMetric,
    set_computed,
)
from lightning_paral.compat.torch.process_groups import default_store
from lightning_paral.data.metrics import change_updates, metrics_of_run
from lightning_paral.data.sampler import EVEN, Mark
from lightning_paral.distributed.exchange import first_difference, values_by_rank
from lightning_paral.distributed.mesh import ParallelDims
from lightning_paral.distributed.watcher import exchange_in_store
from lightning_paral.errors import ConfigurationError

_NEUTRAL = {"mean": 0.0, "sum": 0.0, "max": -torch.inf, "min": torch.inf}
_EXCHANGE_TIMEOUT = timedelta(seconds=10)
_NUM_REMEMBERED = 64
"""How many of the last reductions a rank remembers."""
_EVERY_RANK = (
    "Every rank must log the same keys with sync_dist=True, and log and compute the same metrics that are "
    "synchronized, in the same order, also with rank_zero_only=True. Log values that only some ranks have with "
    "sync_dist=False. Where only some ranks have something to count, call `metric.update(...)`, which waits for no "
    "other rank. If each rank computes a value of its own, create the metric with sync_on_compute=False."
)


# The keys that ranks log


class LoggedHistory:
    """What this rank has reduced over the data ranks. If ranks have reduced the same, they have the same history.

    Args:
        dims: the parallel dimensions.
    """

    def __init__(self, dims: ParallelDims) -> None:
        self.dims = dims
        self.where = "the hooks before the first step"
        """The current step, such as `training batch 3 of epoch 0`. It is equal on all ranks."""
        self.differs: Tensor | None = None
        """Whether another rank has reduced a different key, on a device: reading it waits for the device."""
        self._num_reductions = 0
        self._last: deque[tuple[int, str]] = deque(maxlen=_NUM_REMEMBERED)

    def add(self, what: str) -> None:
        """Remember a reduction, such as `logged 'a' with sync_dist=True in training batch 3 of epoch 0`."""
        self._num_reductions += 1
        self._last.append((self._num_reductions, what))

    def error(self, what: str) -> ConfigurationError:
        """Return the error for values that ranks have reduced with others. Wait a while for ranks that find it too."""
        # The number distinguishes this error from one in an earlier fit, whose history may still be in the store.
        number, rank = default_store().add(f"lightning_paral/logged/{self.dims.rank}", 1), self.dims.rank
        ours = json.dumps([*self._last])
        found = exchange_in_store(f"logged/{number}", ours, _EXCHANGE_TIMEOUT, self.dims.data_ranks)
        difference = _first_difference({rank: dict(json.loads(theirs)) for rank, theirs in found.items()})
        difference = difference or f"rank {rank} {what} and another rank did not"
        return ConfigurationError(f"The ranks have not synchronized the same values: {difference}. {_EVERY_RANK}")


def _first_difference(by_rank: Mapping[int, Mapping[int, str]]) -> str | None:
    """Return a clause that names ranks and values of the first reduction in which they differ, in histories by rank."""
    for number in sorted(set.intersection(*(set(history) for history in by_rank.values()))):
        values = {rank: history[number] for rank, history in sorted(by_rank.items())}
        if len(set(values.values())) > 1:
            return values_by_rank(values)
    return None


def _check_same_keys(by_rank: Mapping[int, Sequence[str]]) -> None:
    """Raise a `ConfigurationError` that names keys and ranks if the ranks have not logged the same keys in an epoch."""
    if len(set(map(tuple, by_rank.values()))) > 1:
        found = first_difference({rank: {(key, "is"): "logged" for key in keys} for rank, keys in by_rank.items()})
        raise ConfigurationError(f"The ranks have not synchronized the same keys in this epoch: {found}. {_EVERY_RANK}")


def _spans_data_ranks(group: Any, dims: ParallelDims) -> bool:
    """Return whether `group`, a process group or `None`, has the data ranks and no others."""
    if group is None:
        return True
    return dist.get_world_size(group) == dims.data_size and dist.get_process_group_ranks(group) == dims.data_ranks


def can_be_read_at_once(value: Tensor) -> bool:
    """Return whether a result computed from `value` can be read without waiting for a device."""
    return value.device.type == "cpu"


# One value of a step


class CheckedReduce:
    """Reduces the values of one key together with its fingerprint and their weight, without an additional collective.

    Lightning reduces values in the order in which a rank logs them. If ranks log different keys, it silently averages
    values of different metrics, or of different steps.

    All values are reduced in float64, because ranks may log one key in different dtypes.

    Args:
        key: the names of the hook and of the value, as in Lightning's results.
        reduce: the strategy's `reduce`, which reduces over the data ranks unless a group is given.
        results: the results to which the value belongs.
    """

    def __init__(self, key: str, reduce: Callable[..., Any], results: "SharedResults") -> None:
        self._key = key
        self._reduce = reduce
        self._results = results

    def __call__(self, value: Any, *, reduce_op: Any = "mean", group: Any = None) -> Any:
        """Return `value` reduced over `group`. *Collective*, unless some ranks may have no batch in the step.

        Raises:
            ConfigurationError: another rank reduces a different key. On CUDA, the value is then not a number, and the
                error comes at the end of the epoch.
        """
        if not isinstance(value, Tensor) or not dist.is_initialized() or self._results.rank_local:
            return value
        history, is_mean = self._results.history, reduce_op == "mean"
        what = f"logged {self._key!r} with sync_dist=True" + ("" if is_mean else f" and reduce_fx={reduce_op!r}")
        what = f"{what} in {history.where}"
        if _spans_data_ranks(group, history.dims):
            history.add(what)
        weight = self._results.mark.weight if is_mean else 1.0
        digest = zlib.crc32(what.encode())
        # Of the extremes of a digest and its negative, both show other digests; of sums, two independent ones do.
        digests = (digest, -digest) if reduce_op in ("max", "min") else (digest, zlib.adler32(what.encode()))
        # `torch.full` does not wait for a GPU, unlike copying numbers to it.
        numbers = [torch.full((1,), number, dtype=torch.float64, device=value.device) for number in (weight, *digests)]
        try:
            reduced = self._reduce(
                torch.cat([value.reshape(-1).double() * weight, *numbers]), reduce_op=reduce_op, group=group
            )
        except RuntimeError as error:
            name = self._key.split(".", 1)[-1]
            error.args = (f"{error}\nThis rank was reducing self.log({name!r}, sync_dist=True). {_EVERY_RANK}",)
            raise
        num_ranks = history.dims.data_size if group is None else dist.get_world_size(group)
        expected = torch.cat(numbers[1:]) * (num_ranks if reduce_op == "sum" else 1)
        # Digests are integers, but a mean of equal ones may be off by a rounding error.
        differs = ~((reduced[-2:] - expected).abs() < 0.5).all()
        if not can_be_read_at_once(value):
            history.differs = differs if history.differs is None else history.differs | differs
            reduced = reduced.masked_fill(differs, torch.nan)  # no logger gets a mean of different keys
        elif differs:
            raise history.error(what)
        result = reduced[:-3] / reduced[-3] if is_mean else reduced[:-3]  # the mean weight of the ranks of `group`
        is_float = value.is_floating_point() or not is_mean
        return result.reshape(value.shape).to(value.dtype if is_float else torch.get_default_dtype())


# The values of an epoch


@dataclass
class _BatchSizes:
    """The batch sizes with which a rank has logged a mean in an epoch.

    A batch size that the user passes to `self.log` may be the number of this rank's samples or tokens: over all ranks
    these numbers add up to that of one process. Or it may be a constant, such as the batch size of the loader, which
    one process passes as well: it has to be divided among the ranks like the samples. Only a comparison of what the
    ranks have logged tells which of the two it is.
    """

    uneven: set[float] = field(default_factory=set)
    """At most two of the batch sizes in uneven steps."""
    exceeds_ranks: bool = False
    """Whether the number of the rank's samples was not 1 in all steps, so that a batch size of 1 is a constant."""
    missing_value: Any = 0.0
    """What the sum of values times batch sizes lacks if the batch size is a constant."""
    missing_size: float = 0.0
    """What `total` lacks if the batch size is a constant."""
    num_padded: int = 0
    """The number of steps in which the rank had no sample."""
    total: float = 0.0
    """The sum of the batch sizes, at the end of the epoch."""
    constant: float | None = None
    """At the end of the epoch, the batch size if it was the same in all steps."""

    def add(self, value: Tensor, batch_size: int, mark: Mark) -> None:
        """Add a value of an uneven step."""
        size = float(batch_size)
        if len(self.uneven) < 2:
            self.uneven.add(size)
        self.exceeds_ranks |= mark.exceeds_ranks
        if mark.is_padding:
            self.num_padded += 1
        else:
            missing = size * mark.weight - size
            self.missing_value = self.missing_value + value.detach().double() * missing
            self.missing_size += missing

    def of_epoch(self, metric: ResultMetric) -> "_BatchSizes":
        """Return what other ranks need to know. `metric` has all values that were logged in the epoch."""
        num_steps, self.total = metric.update_count - self.num_padded, float(metric.cumulated_batch_size)
        size = max(self.uneven) if self.uneven else self.total / max(1, num_steps)
        self.constant = size if len(self.uneven) <= 1 and self.total == size * num_steps else None
        self.missing_value = torch.as_tensor(self.missing_value).cpu()
        return self


@dataclass(frozen=True, kw_only=True)
class _Entry:
    """The values that a rank logged under one key in an epoch, as it sends them to the other ranks."""

    key: str
    meta: Any
    """What the rank passed to `self.log`, without what reduces the value."""
    is_reduced: bool
    """Whether the value of the epoch is computed by all data ranks together."""
    rank_zero_only: bool
    """Whether the other ranks do without the value. All ranks compute a metric that synchronizes."""
    value: Tensor | None
    """The sum, minimum or maximum of the logged values over this rank's batches, on CPU; `None` for a metric."""
    sizes: _BatchSizes | None
    """Of a mean."""


class SharedResults(ResultCollection):
    """Lightning's results, in which each sample counts once, with each key reduced by its `CheckedReduce`.

    In an *uneven step* the ranks have different numbers of samples. Values that are synchronized are then weighted by
    these numbers. At the end of an epoch all values are joined in one exchange.

    Args:
        history: remembers what this rank has reduced.
        training: whether these are the results of training, in which all ranks must log the same keys.
    """

    mark = EVEN
    """The mark of the current step."""
    rank_local = False
    """Whether a rank may have no batch in this step. If so, values that are synchronized per step stay local."""

    def __init__(self, history: LoggedHistory, *, training: bool) -> None:
        self.history = history
        self._reduces: dict[tuple[str, Any], CheckedReduce] = {}
        self._batch_sizes: dict[str, _BatchSizes] = {}
        super().__init__(training)

    def log(self, fx: str, name: str, value: Any, *args: Any, sync_dist_fn: Any = None, **options: Any) -> None:
        """Log a value, as in Lightning."""
        if sync_dist_fn is not None:
            with_index = options.get("add_dataloader_idx", True) and self.dataloader_idx is not None
            key = f"{fx}.{name}.{self.dataloader_idx}" if with_index else f"{fx}.{name}"
            options["sync_dist_fn"] = self._reduce_for(key, sync_dist_fn)
        super().log(fx, name, value, *args, **options)

    def _reduce_for(self, key: str, reduce: Callable[..., Any]) -> CheckedReduce:
        """Return the function that reduces the values of `key`, the same object each time, as Lightning requires."""
        return self._reduces.setdefault((key, reduce), CheckedReduce(key, reduce, self))

    def update_metrics(self, key: str, value: Any, batch_size: int) -> None:
        """Add a value to those logged under `key`, weighted in an uneven step."""
        metric = self[key]
        meta, sync, mark = metric.meta, metric.meta.sync, self.mark
        if mark.weight != 1.0 and metric.is_tensor and sync.should and not sync.rank_zero_only:
            if not value.is_floating_point():
                value = value.to(torch.promote_types(torch.get_default_dtype(), torch.float32))
            if meta.on_epoch and meta.is_mean_reduction:
                self._batch_sizes.setdefault(key, _BatchSizes()).add(value, batch_size, mark)
            if mark.is_padding:
                value, batch_size = torch.full_like(value, _NEUTRAL[meta.reduce_fx.__name__]), 0
        super().update_metrics(key, value, batch_size)

    def metrics(self, on_step: bool) -> Any:
        """Return the values for callbacks, loggers and the progress bar."""
        values = super().metrics(on_step)
        differs = None if on_step else self.history.differs
        if differs is not None and differs:
            raise self.history.error("synchronized a value")
        return values

    def join(self, module: LightningModule) -> None:
        """Join the values of the epoch over all data ranks, even if some had no batch. *Collective* over these ranks.

        Lightning reduces key by key. A rank without a batch has no keys, so the other ranks would wait for it.

        Raises:
            ConfigurationError: in training, the keys differ. The message names keys and ranks.
        """
        dims, of_loader = self.history.dims, self.dataloader_idx
        current = {key: each for key, each in self.items() if each.meta.dataloader_idx == of_loader}
        entries = [self._entry(*item) for item in current.items() if item[1].meta.on_epoch and not item[1].has_reset]
        self._batch_sizes.clear()
        gathered = dims.data_rank_group().gather(entries)
        if self.training:
            names = [
                [f"{'the metric ' if each.value is None else ''}{each.key!r}" for each in theirs if each.is_reduced]
                for theirs in gathered
            ]
            _check_same_keys(dict(zip(dims.data_ranks, names, strict=True)))
        by_rank = [{entry.key: entry for entry in theirs} for theirs in gathered]
        for key in dict.fromkeys(key for by_key in by_rank for key in by_key):
            self._join(key, [by_key.get(key) for by_key in by_rank], module)

    def _entry(self, key: str, metric: ResultMetric) -> _Entry:
        sync, dims = metric.meta.sync, self.history.dims
        is_collective = not metric.is_tensor and _synchronizes(metric.value, dims)
        is_reduced = sync.should and not sync.rank_zero_only and _spans_data_ranks(sync.group, dims)
        is_mean = metric.is_tensor and metric.meta.is_mean_reduction
        meta = copy.copy(metric.meta)
        meta.sync = _reduced_by(None, sync)  # groups and functions cannot be sent
        return _Entry(
            key=key,
            meta=meta,
            is_reduced=is_reduced if metric.is_tensor else is_collective,
            rank_zero_only=sync.rank_zero_only and not is_collective,
            value=metric.value.detach().cpu() if metric.is_tensor else None,
            sizes=self._batch_sizes.get(key, _BatchSizes()).of_epoch(metric) if is_mean else None,
        )

    def _join(self, key: str, entries: list[_Entry | None], module: LightningModule) -> None:
        dims = self.history.dims
        entry = next(each for each in entries if each is not None)
        metric, is_synchronized = self.get(key), entry.meta.sync.should
        if metric is None or metric.has_reset:
            if entry.rank_zero_only or self.training:
                return
            metric = self[key] = self._result_like(entry, module, metric)
            if not is_synchronized and entry.value is not None:
                # The value is not synchronized and this rank has none, but callbacks that monitor it need one.
                set_computed(metric, _reduce([entry]).to(module.device))
        self[key] = self.pop(key)  # computing a metric is collective, so keys need the same order on all ranks
        if entry.value is None or not is_synchronized or entry.rank_zero_only:
            return
        group = metric.meta.sync.group
        ranks = dims.data_ranks if group is None else dist.get_process_group_ranks(group)
        if dims.rank in ranks:
            by_rank = dict(zip(dims.data_ranks, entries, strict=True))
            reduced = _reduce([each for rank in ranks if (each := by_rank.get(rank)) is not None])
            set_computed(metric, reduced.to(module.device))

    def _result_like(self, entry: _Entry, module: LightningModule, metric: ResultMetric | None) -> ResultMetric:
        """Return the result that this rank would have if it had logged the values of `entry`."""
        if metric is None:
            reduce = self._reduce_for(entry.key, module.trainer.strategy.reduce)
            entry.meta.sync = _reduced_by(reduce, entry.meta.sync)
            metric = ResultMetric(entry.meta, is_tensor=entry.value is not None)
        if entry.value is None:
            assert entry.meta.metric_attribute is not None
            metric.value = attrgetter(entry.meta.metric_attribute)(module)
            set_computed(metric, None)
        metric.has_reset = False
        return metric


def _reduced_by(reduce: Any, sync: Any) -> Any:
    """Return a copy of `sync`, by which Lightning reduces a value, that reduces with `reduce` over the data ranks."""
    changed = copy.copy(sync)
    changed.fn, changed.rank_zero_only = reduce, False
    changed.group = None  # last: the setter makes the other attributes count
    return changed


def _synchronizes(metric: Metric, dims: ParallelDims) -> bool:
    """Return whether `compute` of `metric` is collective over the data ranks."""
    parts = [part for part in metric.modules() if isinstance(part, Metric)]
    # Wrappers and compositions of metrics gather nothing themselves.
    with_states = [part for part in parts if part.metric_state] or parts
    return any(part.sync_on_compute and _spans_data_ranks(part.process_group, dims) for part in with_states)


def _reduce(entries: list[_Entry]) -> Tensor:
    values = torch.stack([entry.value for entry in entries if entry.value is not None])
    sizes = [entry.sizes for entry in entries if entry.sizes is not None]
    reduction = entries[0].meta.reduce_fx.__name__
    if reduction in ("max", "min"):
        extreme: Tensor = getattr(torch, reduction)(values)
        return extreme
    total = values.double().sum()
    if sizes:
        size = sum(each.total for each in sizes)
        constant = sizes[0].constant
        are_constant = constant is not None and all(each.constant == constant for each in sizes)
        # If no rank ever had more than one sample, a batch size of 1 is its number of samples.
        if are_constant and (constant != 1.0 or any(each.exceeds_ranks for each in sizes)):
            total = total + sum(each.missing_value.double() for each in sizes)
            size += sum(each.missing_size for each in sizes)
        total = total / size
    return total.to(values.dtype)


class TrainingResults(SharedResults):
    """Lightning's results of training. The repeated sample of a rank that has none of its own counts nowhere.

    The values of an epoch are computed on all ranks before the hooks of its end. Otherwise the progress bar, and hooks
    of some ranks that read them, would compute them before the other ranks.

    Args:
        trainer: the Trainer, which logs to these results.
        history: remembers what this rank has reduced.
        current_mark: a function that returns how the batch of the current step is divided.
        undo: a stack to which functions that undo changes of the trainer are pushed.
    """

    def __init__(
        self, trainer: Trainer, history: LoggedHistory, current_mark: Callable[[], Mark], undo: ExitStack
    ) -> None:
        self._trainer = trainer
        self._current_mark = current_mark
        self._batch: Any = None
        self._step = ExitStack()
        self._metrics: list[Any] | None = None  # found in this epoch
        super().__init__(history, training=True)
        set_results(trainer.fit_loop.epoch_loop, self)
        end_epoch = trainer.fit_loop.on_advance_end

        def join_and_end_epoch() -> None:
            self._step.close()
            self.mark = EVEN  # also if `on_train_batch_start` ended the epoch by returning -1
            self._metrics = None
            history.where = f"the hooks at the end of epoch {trainer.current_epoch}"
            self.join(trainer.lightning_module)
            self.metrics(on_step=False)
            end_epoch()

        shadow_method(trainer.fit_loop, "on_advance_end", join_and_end_epoch, undo)
        undo.callback(self._step.close)

    @property
    def batch(self) -> Any:
        """The current batch. Lightning sets it when a batch begins, and to `None` when its last hook has ended."""
        return self._batch

    @batch.setter
    def batch(self, batch: Any) -> None:
        self._batch = batch
        self._step.close()  # metrics count again what they are updated with
        self.mark = EVEN
        if batch is None:
            return
        trainer = self._trainer
        self.history.where = f"training batch {trainer.fit_loop.epoch_loop.batch_idx} of epoch {trainer.current_epoch}"
        self.mark = self._current_mark()
        if self.mark.weight != 1.0:
            if self.mark.some_have_none:
                _reject_sync_batch_norm(trainer.lightning_module)
            if self._metrics is None or self.mark.is_padding:
                self._metrics = metrics_of_run(trainer)
            change_updates(self._metrics, self.mark.weight, self._step)


def _reject_sync_batch_norm(module: Module) -> None:
    """Raise a `ConfigurationError` if the repeated sample would change the activations of other ranks."""
    name = next((name for name, part in module.named_modules() if isinstance(part, SyncBatchNorm)), None)
    if name is not None:
        raise ConfigurationError(
            f"A batch has fewer samples than there are ranks, and {name} is a SyncBatchNorm. A sample that a rank "
            "repeats, because it has none of its own, would change the statistics of all ranks, and with them the "
            "gradient. Set drop_last=True in the loader, or leave out sync_batchnorm=True."
        )
