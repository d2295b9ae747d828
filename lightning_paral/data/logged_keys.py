"""Check that all ranks reduce the same key in `self.log(..., sync_dist=True)`."""

import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_paral.compat.lightning.results import ResultCollection, Sync
from lightning_paral.compat.torch.process_groups import default_store
from lightning_paral.data.logged_steps import EVERY_RANK, LoggedSteps
from lightning_paral.data.pending_checks import PendingChecks
from lightning_paral.data.same_keys import check_same_keys, spans_data_ranks
from lightning_paral.distributed.mesh import ParallelDims
from lightning_paral.distributed.store_exchange import exchange_in_store
from lightning_paral.errors import ConfigurationError

_LARGEST_SUM = {torch.float32: 2**23, torch.float64: 2**52}
"""By dtype, an upper bound for sums of fingerprints, so that they are exact."""

_EXCHANGE_TIMEOUT = timedelta(seconds=5)


class CheckedReduce:
    """Reduces the values of one key together with two fingerprints of key and step, without an additional collective.

    Lightning reduces values in the order in which a rank logs them. If ranks log different keys, it silently averages
    values of different metrics, or of different steps.

    All values are reduced in float64, because ranks may log one key in different dtypes.

    Args:
        key: the names of the hook and of the value, as in Lightning's results.
        reduce: the strategy's `reduce`.
        dims: the parallel dimensions. `reduce` reduces over the data ranks unless a group is given.
        steps: keeps what this rank has reduced over the data ranks.
    """

    def __init__(
        self, key: str, reduce: Callable[..., Any], dims: ParallelDims, steps: LoggedSteps | None = None
    ) -> None:
        self.key = key
        self._what = f"logged {key!r} with sync_dist=True"
        self._steps = LoggedSteps() if steps is None else steps
        self.weight = 1.0
        """The weight of this rank's value in means, because ranks may have different numbers of samples in a step. All
        ranks have the weight 1.0, or none has. The mean of the weights of all data ranks is 1."""
        self._dims = dims
        self._reduce = reduce
        self._pending: PendingChecks[tuple[str, Any]] = PendingChecks()

    def __call__(self, value: Any, *, reduce_op: Any = "mean", group: Any = None) -> Any:
        """Return `value` reduced over `group`. *Collective*.

        Raises:
            ConfigurationError: another rank reduces a different key. On CUDA, a later `check` raises it.
        """
        if not isinstance(value, Tensor) or not dist.is_initialized():
            return value
        if self.weight != 1.0 and reduce_op == "mean":
            value = self._weighted(value, group)
        fingerprints = self._fingerprints_of_step(value, reduce_op, group)
        if spans_data_ranks(group, self._dims):
            self._steps.begin_reduction(self._what)
        try:
            together = torch.cat([value.reshape(-1).to(fingerprints.dtype), fingerprints])
            reduced = self._reduce(together, reduce_op=reduce_op, group=group)
        except RuntimeError as error:
            if (found := self._find_difference()) is not None:
                raise found from error
            error.args = (f"{error}\nThis rank was reducing self.log({self._name!r}, sync_dist=True). {EVERY_RANK}",)
            raise
        finally:
            self._steps.end_reduction()
        expected = fingerprints if reduce_op != "sum" else fingerprints * self._num_ranks(group)
        # Fingerprints are integers, but a mean of equal ones may be off by a rounding error.
        is_same = ((reduced[-2:] - expected).abs() < 0.5).all()
        if not can_be_read_at_once(value):
            self._pending.add(is_same, (self._steps.where, group))
            if self._pending.are_many:
                self.check(wait=False)
        elif not is_same:
            raise self._error(self._steps.where, group)
        return reduced[:-2].reshape(value.shape).to(_dtype_of_result(value, reduce_op))

    def _find_difference(self) -> Exception | None:
        with suppress(dist.DistError, RuntimeError):  # rank 0, which serves the store, may have ended
            return None if self._steps.find_difference is None else self._steps.find_difference()
        return None

    def _weighted(self, value: Tensor, group: Any) -> Tensor:
        """Return this rank's part of the weighted mean over `group`. *Collective* if a group is given."""
        if group is None:
            return value * self.weight
        mean: Tensor = self._reduce(_filled(self.weight, _dtype_of_reduction(value), value.device), group=group)
        return value * self.weight / mean.reshape(()).to(value.dtype)

    def check(self, *, wait: bool) -> None:
        """Raise the `ConfigurationError` of earlier calls whose result was still on the device.

        Args:
            wait: whether to wait for all results. Otherwise check only those that have arrived, because waiting in each
                step would stall the device.
        """
        failed = self._pending.first_failed(wait=wait)
        if failed is not None:
            raise self._error(*failed)

    def _num_ranks(self, group: Any) -> int:
        return self._dims.data_size if group is None else dist.get_world_size(group)

    @property
    def _name(self) -> str:
        return self.key.split(".", 1)[-1]

    def _fingerprints_of_step(self, value: Tensor, reduce_op: Any, group: Any) -> Tensor:
        dtype = _dtype_of_reduction(value)
        largest = _LARGEST_SUM[dtype] // self._num_ranks(group)
        name = f"{self.key} {reduce_op} {self._steps.step}".encode()
        digests = [zlib.crc32(salt + name) % largest for salt in (b"1", b"2")]
        if reduce_op in ("max", "min"):
            digests = [digests[0], -digests[0]]  # compares both the largest and the smallest digest of all ranks
        return torch.cat([_filled(digest, dtype, value.device) for digest in digests])

    def _error(self, where: str, group: Any) -> ConfigurationError:
        ranks = self._dims.data_ranks if group is None else dist.get_process_group_ranks(group)
        others = _other_keys(self.key, where, ranks)
        also = "; ".join(f"rank {rank} logged {key!r} in {where}" for rank, (key, where) in others.items())
        what = "the same key in another step" if _are_of(self.key, others) else "a different key"
        return ConfigurationError(
            f"Rank {dist.get_rank()} logged {self.key!r} with sync_dist=True in {where} while "
            f"another rank logged {what}{f': {also}' if also else ''}. Their values would be averaged with each other. "
            f"{EVERY_RANK}"
        )


def _are_of(key: str, others: dict[int, tuple[str, str]]) -> bool:
    return bool(others) and all(other == key for other, _ in others.values())


def _dtype_of_reduction(value: Tensor) -> torch.dtype:
    """Return the dtype in which all ranks reduce a key: float64, or float32 on devices that may not have it."""
    return torch.float64 if value.device.type in ("cpu", "cuda") else torch.float32


def _dtype_of_result(value: Tensor, reduce_op: Any) -> torch.dtype:
    is_float = value.is_floating_point() or reduce_op != "mean"
    return value.dtype if is_float else torch.get_default_dtype()


def _filled(number: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor with one element. This does not wait for a GPU, unlike copying a number to it."""
    return torch.full((1,), number, dtype=dtype, device=device)


def can_be_read_at_once(value: Tensor) -> bool:
    """Return whether a result computed from `value` can be read without waiting for a device."""
    return value.device.type == "cpu"


@contextmanager
def weighted(sync: Sync, weight: float) -> Iterator[None]:
    """Give this rank's values a weight in means that `sync` computes in this context."""
    reduce = sync.fn
    assert isinstance(reduce, CheckedReduce)
    reduce.weight = weight
    try:
        yield
    finally:
        reduce.weight = 1.0


class CheckedResults(ResultCollection):
    """Lightning's results, with each key reduced by its `CheckedReduce`."""

    def __init__(self, dims: ParallelDims, training: bool = True, steps: LoggedSteps | None = None) -> None:
        super().__init__(training)
        self.dims = dims
        self.steps = LoggedSteps() if steps is None else steps
        self._reduces: dict[tuple[str, Any], CheckedReduce] = {}

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
            self._reduces[entry] = CheckedReduce(key, reduce, self.dims, self.steps)
        return self._reduces[entry]

    def metrics(self, on_step: bool) -> Any:
        """Return the values for callbacks, loggers and the progress bar."""
        values = super().metrics(on_step)
        for reduce in self._reduces.values():
            reduce.check(wait=not on_step)
        return values

    def check_keys(self) -> None:
        """Check that all data ranks are about to reduce the same keys. *Collective* over the data ranks.

        Raises:
            ConfigurationError: the keys differ. The message names keys and ranks.
        """
        check_same_keys(self.valid_items(), self.dims)


def _other_keys(key: str, where: str, ranks: Sequence[int]) -> dict[int, tuple[str, str]]:
    """Exchange keys and steps with those of `ranks` that find the same error in time. Return those that differ."""
    # The number distinguishes this error from one in an earlier fit, whose keys may still be in the store.
    number = default_store().add(f"lightning_paral/logged/{dist.get_rank()}", 1)
    found = exchange_in_store(f"logged/{number}", json.dumps([key, where]), _EXCHANGE_TIMEOUT, ranks)
    by_rank = {rank: tuple(json.loads(other)) for rank, other in found.items()}
    return {rank: other for rank, other in by_rank.items() if other != (key, where)}
