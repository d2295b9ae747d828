"""Check that all ranks reduce the same keys of `self.log(..., sync_dist=True)`."""

import zlib
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torchmetrics import Metric

from lightning_paral.compat.lightning.results import ResultCollection, ResultMetric
from lightning_paral.compat.torch.process_groups import default_store
from lightning_paral.data.logged_agreement import EVERY_RANK, LoggedHistory, Record, error_about, find_difference
from lightning_paral.distributed.exchange import name_ranks
from lightning_paral.distributed.mesh import ParallelDims
from lightning_paral.distributed.watcher import exchange_in_store
from lightning_paral.errors import ConfigurationError

_LARGEST_SUM = 2**52
"""An upper bound for sums of fingerprints, so that they are exact in float64."""
_EXCHANGE_TIMEOUT = timedelta(seconds=5)
_METRIC = "the metric "


class DeviceFlag:
    """Whether any of many checks has failed, read without waiting for the device on which the results are."""

    def __init__(self) -> None:
        self._raised: Tensor | None = None
        self._sent: tuple[Tensor, torch.cuda.Event | None] | None = None

    def add(self, failed: Tensor) -> None:
        """Add the result of a check, a 0-dimensional tensor of booleans."""
        self._raised = failed if self._raised is None else self._raised | failed

    def read(self, *, wait: bool) -> bool:
        """Return whether a check has failed whose result has arrived; with `wait=True`, wait for all results."""
        while self._sent is not None or self._raised is not None:
            if self._sent is None:
                assert self._raised is not None
                self._sent, self._raised = _send_to_host(self._raised), None
            copy, event = self._sent
            if event is not None and wait:
                event.synchronize()
            if event is not None and not event.query():  # type: ignore[no-untyped-call]
                return False
            self._sent = None
            if copy:
                return True
        return False


def _send_to_host(flag: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    if flag.device.type != "cuda":
        return flag, None
    copy = torch.empty(flag.shape, dtype=flag.dtype, device="cpu", pin_memory=True).copy_(flag, non_blocking=True)
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(flag.device))
    return copy, event


class CheckedReduce:
    """Reduces the values of one key together with two fingerprints of key and step, without an additional collective.

    Lightning reduces values in the order in which a rank logs them. If ranks log different keys, it silently averages
    values of different metrics, or of different steps.

    All values are reduced in float64, because ranks may log one key in different dtypes.

    Args:
        key: the names of the hook and of the value, as in Lightning's results.
        reduce: the strategy's `reduce`.
        dims: the parallel dimensions. `reduce` reduces over the data ranks unless a group is given.
        history: remembers what this rank has reduced over the data ranks.
        differs: set if another rank has reduced a different key, and the result of the comparison is on a device.
    """

    def __init__(
        self, key: str, reduce: Callable[..., Any], dims: ParallelDims, history: LoggedHistory, differs: DeviceFlag
    ) -> None:
        self.weight = 1.0
        """The weight of this rank's value in means, because ranks may have different numbers of samples in a step. All
        ranks have the weight 1.0, or none has. The mean of the weights of all data ranks is 1."""
        self._key = key
        self._reduce = reduce
        self._dims = dims
        self._history = history
        self._differs = differs

    def __call__(self, value: Any, *, reduce_op: Any = "mean", group: Any = None) -> Any:
        """Return `value` reduced over `group`. *Collective*.

        Raises:
            ConfigurationError: another rank reduces a different key. On CUDA, the value is then not a number, and
                `differs` is set.
        """
        if not isinstance(value, Tensor) or not dist.is_initialized():
            return value
        if self.weight != 1.0 and reduce_op == "mean":
            value = self._weighted(value, group)
        what = f"logged {self._key!r} with sync_dist=True"
        what += "" if reduce_op == "mean" else f" and reduce_fx={reduce_op!r}"
        fingerprints = self._fingerprints(what, value.device, reduce_op, group)
        together = torch.cat([value.reshape(-1).double(), fingerprints])
        try:
            with self._history.reducing(what) if spans_data_ranks(group, self._dims) else nullcontext():
                reduced = self._reduce(together, reduce_op=reduce_op, group=group)
        except RuntimeError as error:
            name = self._key.split(".", 1)[-1]
            error.args = (f"{error}\nThis rank was reducing self.log({name!r}, sync_dist=True). {EVERY_RANK}",)
            raise
        expected = fingerprints if reduce_op != "sum" else fingerprints * self._num_ranks(group)
        # Fingerprints are integers, but a mean of equal ones may be off by a rounding error.
        differs = ~((reduced[-2:] - expected).abs() < 0.5).all()
        if not can_be_read_at_once(value):
            self._differs.add(differs)
            reduced = reduced.masked_fill(differs, torch.nan)  # no logger gets a mean of different keys
        elif differs:
            raise explain(self._history, self._dims, what)
        return reduced[:-2].reshape(value.shape).to(_dtype_of_result(value, reduce_op))

    def _weighted(self, value: Tensor, group: Any) -> Tensor:
        """Return this rank's part of the weighted mean over `group`. *Collective* if a group is given."""
        if group is None:
            return value * self.weight
        mean: Tensor = self._reduce(_filled(self.weight, value.device), group=group)
        return value * self.weight / mean.reshape(()).to(value.dtype)

    def _num_ranks(self, group: Any) -> int:
        return self._dims.data_size if group is None else dist.get_world_size(group)

    def _fingerprints(self, what: str, device: torch.device, reduce_op: Any, group: Any) -> Tensor:
        largest = _LARGEST_SUM // self._num_ranks(group)
        name = f"{what} in {self._history.step}".encode()
        digests = [zlib.crc32(salt + name) % largest for salt in (b"1", b"2")]
        if reduce_op in ("max", "min"):
            digests = [digests[0], -digests[0]]  # compares both the largest and the smallest digest of all ranks
        return torch.cat([_filled(digest, device) for digest in digests])


def explain(history: LoggedHistory, dims: ParallelDims, what: str) -> ConfigurationError:
    """Return the error for values that ranks have reduced with others. Wait a while for ranks that find it as well."""
    # The number distinguishes this error from one in an earlier fit, whose records may still be in the store.
    number = default_store().add(f"lightning_paral/logged/{dims.rank}", 1)
    found = exchange_in_store(f"logged/{number}", history.record().to_json(), _EXCHANGE_TIMEOUT, dims.data_ranks)
    difference = find_difference({rank: Record.from_json(text) for rank, text in found.items()})
    return error_about(*(difference or (history.where, f"rank {dims.rank} {what} and another rank did not")))


def _dtype_of_result(value: Tensor, reduce_op: Any) -> torch.dtype:
    is_float = value.is_floating_point() or reduce_op != "mean"
    return value.dtype if is_float else torch.get_default_dtype()


def _filled(number: float, device: torch.device) -> Tensor:
    """Return a tensor with one element. This does not wait for a GPU, unlike copying a number to it."""
    return torch.full((1,), number, dtype=torch.float64, device=device)


def can_be_read_at_once(value: Tensor) -> bool:
    """Return whether a result computed from `value` can be read without waiting for a device."""
    return value.device.type == "cpu"


class CheckedResults(ResultCollection):
    """Lightning's results, with each key reduced by its `CheckedReduce`."""

    def __init__(self, dims: ParallelDims, history: LoggedHistory, *, training: bool) -> None:
        self.dims = dims
        self.history = history
        self._differs = DeviceFlag()
        self._reduces: dict[tuple[str, Any], CheckedReduce] = {}
        super().__init__(training)

    def log(self, fx: str, name: str, value: Any, *args: Any, sync_dist_fn: Any = None, **options: Any) -> None:
        """Log a value, as in Lightning."""
        if sync_dist_fn is not None:
            with_index = options.get("add_dataloader_idx", True) and self.dataloader_idx is not None
            key = f"{fx}.{name}.{self.dataloader_idx}" if with_index else f"{fx}.{name}"
            options["sync_dist_fn"] = self.reduce_for(key, sync_dist_fn)
        super().log(fx, name, value, *args, **options)

    def reduce_for(self, key: str, reduce: Callable[..., Any]) -> CheckedReduce:
        """Return the function that reduces the values of `key`, the same object each time, as Lightning requires."""
        entry = (key, getattr(reduce, "__self__", reduce))
        if entry not in self._reduces:
            self._reduces[entry] = CheckedReduce(key, reduce, self.dims, self.history, self._differs)
        return self._reduces[entry]

    def metrics(self, on_step: bool) -> Any:
        """Return the values for callbacks, loggers and the progress bar."""
        values = super().metrics(on_step)
        if self._differs.read(wait=not on_step):
            raise explain(self.history, self.dims, "logged a key with sync_dist=True")
        return values

    def check_keys(self) -> None:
        """Check that all data ranks are about to reduce the same keys of the epoch. *Collective* over the data ranks.

        Raises:
            ConfigurationError: the keys differ. The message names keys and ranks.
        """
        ours = [
            f"{'' if result.is_tensor else _METRIC}{key!r}"
            for key, result in self.valid_items()
            if result.meta.on_epoch and self._is_reduced(result)
        ]
        by_rank = dict(zip(self.dims.data_ranks, self.dims.data_rank_group().gather(ours), strict=True))
        if any(theirs != ours for theirs in by_rank.values()):
            raise _error(by_rank)

    def _is_reduced(self, result: ResultMetric) -> bool:
        """Return whether the value of the epoch is computed by all data ranks together."""
        if not result.is_tensor:
            return synchronizes(result.value, self.dims)
        sync = result.meta.sync
        return sync.should and not sync.rank_zero_only and spans_data_ranks(sync.group, self.dims)


def synchronizes(metric: Metric, dims: ParallelDims) -> bool:
    """Return whether `compute` of `metric` is collective over the data ranks."""
    parts = [part for part in metric.modules() if isinstance(part, Metric)]
    # Wrappers and compositions of metrics gather nothing themselves.
    with_states = [part for part in parts if part.metric_state] or parts
    return any(part.sync_on_compute and spans_data_ranks(part.process_group, dims) for part in with_states)


def spans_data_ranks(group: Any, dims: ParallelDims) -> bool:
    """Return whether `group`, a process group or `None`, has the data ranks and no others."""
    if group is None:
        return True
    return dist.get_world_size(group) == dims.data_size and dist.get_process_group_ranks(group) == dims.data_ranks


def _error(by_rank: dict[int, list[str]]) -> ConfigurationError:
    every = dict.fromkeys(key for keys in by_rank.values() for key in keys)
    ranks_by_key = {key: [rank for rank, keys in by_rank.items() if key in keys] for key in every}
    partial = [f"{key} only by {name_ranks(r)}" for key, r in ranks_by_key.items() if len(r) < len(by_rank)]
    orders = dict.fromkeys(f"[{', '.join(keys)}]" for keys in by_rank.values())
    found = "; ".join(partial[:8]) or f"in another order: {' and '.join(orders)}"
    how = "" if any(key.startswith(_METRIC) for key in every) else " with sync_dist=True"
    return ConfigurationError(f"The ranks have not logged the same keys{how} in this epoch: {found}. {EVERY_RANK}")
