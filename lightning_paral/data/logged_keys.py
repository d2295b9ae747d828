"""Check that all ranks log the same keys with `sync_dist=True`, in the collectives that reduce the values anyway."""

import json
import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_paral.compat.torch.process_groups import default_store
from lightning_paral.distributed.exchange import name_ranks
from lightning_paral.distributed.mesh import ParallelDims
from lightning_paral.distributed.watcher import exchange_in_store
from lightning_paral.errors import ConfigurationError

_LARGEST_SUM = 2**52
"""An upper bound for sums of fingerprints, so that they are exact in float64."""
_EXCHANGE_TIMEOUT = timedelta(seconds=10)
_NUM_REMEMBERED = 64
"""How many of the last reductions a rank remembers."""
_NUM_NAMED = 8
METRIC = "the metric "
_EVERY_RANK = (
    "Every rank must log the same keys with sync_dist=True, and log and compute the same metrics that are "
    "synchronized, in the same order, also with rank_zero_only=True. Log values that only some ranks have with "
    "sync_dist=False. Where only some ranks have something to count, call `metric.update(...)`, which waits for no "
    "other rank. If each rank computes a value of its own, create the metric with sync_on_compute=False."
)


class LoggedHistory:
    """What this rank has reduced over the data ranks. If ranks have reduced the same, they have the same history."""

    def __init__(self) -> None:
        self.where = "the hooks before the first step"
        """The current step, such as `training batch 3 of epoch 0`. It is equal on all ranks."""
        self._num_reductions = 0
        self._last: deque[tuple[int, str, str]] = deque(maxlen=_NUM_REMEMBERED)

    def add(self, what: str) -> None:
        """Remember a reduction, such as `logged 'a' with sync_dist=True`."""
        self._num_reductions += 1
        self._last.append((self._num_reductions, self.where, what))

    def error(self, what: str, dims: ParallelDims) -> ConfigurationError:
        """Return the error for values that ranks have reduced with others. Wait a while for ranks that find it too."""
        # The number distinguishes this error from one in an earlier fit, whose history may still be in the store.
        number = default_store().add(f"lightning_paral/logged/{dims.rank}", 1)
        found = exchange_in_store(f"logged/{number}", json.dumps([*self._last]), _EXCHANGE_TIMEOUT, dims.data_ranks)
        histories = {rank: {each[0]: (each[1], each[2]) for each in json.loads(text)} for rank, text in found.items()}
        where, difference = first_difference(histories) or (
            self.where,
            f"rank {dims.rank} {what} and another rank did not",
        )
        return ConfigurationError(
            f"The ranks have not synchronized the same values in {where}: {difference}. {_EVERY_RANK}"
        )


def first_difference(by_rank: Mapping[int, Mapping[int, tuple[str, str]]]) -> tuple[str, str] | None:
    """Return the step of the first reduction in which ranks differ, and a clause that names the values and ranks.

    Args:
        by_rank: of each rank, by number, the step of a reduction and what was reduced.
    """
    for number in sorted(set.intersection(*(set(history) for history in by_rank.values()))):
        ranks_by_value: dict[tuple[str, str], list[int]] = {}
        for rank, history in sorted(by_rank.items()):
            ranks_by_value.setdefault(history[number], []).append(rank)
        if len(ranks_by_value) > 1:
            first = next(iter(ranks_by_value))[0]
            clauses = [
                f"{name_ranks(ranks)} {what}" + ("" if where == first else f" in {where}")
                for (where, what), ranks in ranks_by_value.items()
            ]
            return first, " and ".join(clauses[:_NUM_NAMED])
    return None


class DeviceFlag:
    """Whether any of many checks has failed, read without waiting for the device on which the results are."""

    def __init__(self) -> None:
        self._raised: Tensor | None = None
        self._on_host: Tensor | None = None

    def add(self, failed: Tensor) -> None:
        """Add the result of a check, a 0-dimensional tensor of booleans."""
        self._raised = failed if self._raised is None else self._raised | failed

    def read(self, *, wait: bool) -> bool:
        """Return whether a check has failed whose result has arrived; with `wait=True`, wait for all results."""
        if self._raised is None:
            return False
        if wait or self._raised.device.type != "cuda":
            return bool(self._raised)
        if self._on_host is None:
            self._on_host = torch.zeros((), dtype=torch.bool, pin_memory=True)
        self._on_host.copy_(self._raised, non_blocking=True)  # arrives before a later call
        return bool(self._on_host)


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
        if spans_data_ranks(group, self._dims):
            self._history.add(what)
        fingerprints = self._fingerprints(what, value.device, reduce_op, group)
        together = torch.cat([value.reshape(-1).double(), fingerprints])
        try:
            reduced = self._reduce(together, reduce_op=reduce_op, group=group)
        except RuntimeError as error:
            name = self._key.split(".", 1)[-1]
            error.args = (f"{error}\nThis rank was reducing self.log({name!r}, sync_dist=True). {_EVERY_RANK}",)
            raise
        expected = fingerprints if reduce_op != "sum" else fingerprints * self._num_ranks(group)
        # Fingerprints are integers, but a mean of equal ones may be off by a rounding error.
        differs = ~((reduced[-2:] - expected).abs() < 0.5).all()
        if not can_be_read_at_once(value):
            self._differs.add(differs)
            reduced = reduced.masked_fill(differs, torch.nan)  # no logger gets a mean of different keys
        elif differs:
            raise self._history.error(what, self._dims)
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
        name = f"{what} in {self._history.where}".encode()
        digests = [zlib.crc32(salt + name) % largest for salt in (b"1", b"2")]
        if reduce_op in ("max", "min"):
            digests = [digests[0], -digests[0]]  # compares both the largest and the smallest digest of all ranks
        return torch.cat([_filled(digest, device) for digest in digests])


def _dtype_of_result(value: Tensor, reduce_op: Any) -> torch.dtype:
    is_float = value.is_floating_point() or reduce_op != "mean"
    return value.dtype if is_float else torch.get_default_dtype()


def _filled(number: float, device: torch.device) -> Tensor:
    """Return a tensor with one element. This does not wait for a GPU, unlike copying a number to it."""
    return torch.full((1,), number, dtype=torch.float64, device=device)


def can_be_read_at_once(value: Tensor) -> bool:
    """Return whether a result computed from `value` can be read without waiting for a device."""
    return value.device.type == "cpu"


def spans_data_ranks(group: Any, dims: ParallelDims) -> bool:
    """Return whether `group`, a process group or `None`, has the data ranks and no others."""
    if group is None:
        return True
    return dist.get_world_size(group) == dims.data_size and dist.get_process_group_ranks(group) == dims.data_ranks


def check_same_keys(by_rank: Mapping[int, Sequence[str]]) -> None:
    """Raise a `ConfigurationError` that names keys and ranks if the ranks have not logged the same keys in an epoch."""
    orders = dict.fromkeys(f"[{', '.join(keys)}]" for keys in by_rank.values())
    if len(orders) == 1:
        return
    every = dict.fromkeys(key for keys in by_rank.values() for key in keys)
    ranks_by_key = {key: [rank for rank, keys in by_rank.items() if key in keys] for key in every}
    partial = [f"{key} only by {name_ranks(r)}" for key, r in ranks_by_key.items() if len(r) < len(by_rank)]
    found = "; ".join(partial[:_NUM_NAMED]) or f"in another order: {' and '.join(orders)}"
    how = "" if any(key.startswith(METRIC) for key in every) else " with sync_dist=True"
    raise ConfigurationError(f"The ranks have not logged the same keys{how} in this epoch: {found}. {_EVERY_RANK}")
