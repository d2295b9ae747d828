"""Distribute the loader of an iterable dataset: every rank reads the full stream and keeps its own batches."""

import dataclasses
from collections.abc import Iterable, Iterator
from itertools import count, islice
from typing import Any, cast

from lightning.pytorch.utilities import rank_zero_info
from torch.utils.data import BatchSampler, IterableDataset, get_worker_info

from lightning_paral.compat.torch.loaders import copy_without_workers
from lightning_paral.data.global_order import Seed
from lightning_paral.data.loader import Loader, with_iteration
from lightning_paral.data.order_rng import SeededRNG, derive_seed
from lightning_paral.data.padding import CollatePadding, PaddingBatch, mark_maybe_uneven
from lightning_paral.data.sampler import ShardSpec, too_few_batches
from lightning_paral.errors import ConfigurationError


def distribute_iterable(
    loader: Loader, shard: ShardSpec, seed: Seed, loader_index: int
) -> tuple[Loader, "ShardedIterable"]:
    """Return a copy of `loader` that yields this rank's batches, and the dataset of the copy.

    Args:
        loader: the user's loader. It is not changed.
        shard: which batches this rank draws.
        seed: the seed of the orders of the run.
        loader_index: the index among the loaders of the same Lightning stage.

    Raises:
        ConfigurationError: `split="global"` cannot divide the batches of a training loader equally among the ranks.
    """
    name = type(loader.dataset).__name__
    batch_size = loader.batch_size or 1
    if shard.split == "global" and batch_size % shard.data_size:
        if shard.remainder != "pad":
            raise ConfigurationError(
                f"split='global' divides each batch of {name} among {shard.data_size} ranks, but the loader has "
                f"batch_size={loader.batch_size}. Make it a multiple of the number of ranks, or set split='batch'."
            )
        shard = dataclasses.replace(shard, split="batch")
    if shard.data_size > 1:
        rank_zero_info(
            f"{name} is an iterable dataset: each of {shard.data_size} ranks x {max(1, loader.num_workers)} "
            "workers reads all of it and keeps its part. If the dataset shards itself by rank or worker, set "
            "shard_iterable=False."
        )
    dataset = cast(Iterable[Any], loader.dataset)
    stream = ShardedIterable(dataset, shard, batch_size, loader.drop_last, seed, loader_index)
    return with_stream(loader, stream), stream


def with_stream(loader: Loader, stream: "ShardedIterable") -> Loader:
    """Return a copy of `loader` that reads `stream` instead of its dataset."""
    forwarder = _EpochForwarder(stream)
    changes: dict[str, Any] = {"dataset": stream, "sampler": forwarder, "drop_last": False}
    if loader.batch_size is not None:
        changes["batch_size"] = stream.local_batch_size
        changes["batch_sampler"] = BatchSampler(forwarder, stream.local_batch_size, drop_last=False)  # type: ignore[arg-type]
    if stream.shard.may_need_padding:
        changes["collate_fn"] = CollatePadding(loader.collate_fn)
    changed = copy_without_workers(loader, **changes)
    return with_iteration(changed, mark_maybe_uneven) if stream.shard.may_need_padding else changed


class ShardedIterable(IterableDataset[Any]):
    """This rank's samples of a stream or, in a `DataLoader` worker, the worker's part of them.

    The stream is read in global batches: the samples that all ranks together use in one step. Worker `i` of `n` yields
    samples of the global batches `i`, `i + n`, ..., so that a rank gets the same batches as from a map-style dataset.
    Every worker process has a copy of this object.

    Args:
        dataset: the user's dataset. It must yield the same samples in every process; it does if all its random numbers
            come from the global generators.
        shard: which batches this rank draws.
        batch_size: the number of samples in a batch of the user's loader; 1 if that has `batch_size=None`.
        drop_last: whether to leave out the last batch if it is smaller.
        seed: the seed of the orders of the run.
        loader_index: the index among the loaders of the same Lightning stage.
    """

    def __init__(
        self, dataset: Iterable[Any], shard: ShardSpec, batch_size: int, drop_last: bool, seed: Seed, loader_index: int
    ) -> None:
        self.dataset = dataset
        self.shard = shard
        self.batch_size = batch_size
        self.drop_last = drop_last
        self._seed = seed
        self._loader_index = loader_index
        self._epoch = 0
        self._num_iterations = 0  # of this epoch, but of all epochs in persistent workers, which do not see `set_epoch`
        self._skip = 0

    @property
    def epoch(self) -> int:
        """The epoch of the next or current iteration."""
        return self._epoch

    def set_epoch(self, epoch: int) -> None:
        """Make `epoch` the epoch of the next iteration."""
        if epoch != self._epoch:
            self._epoch, self._skip = epoch, 0
        self._num_iterations = 0

    def resume(self, epoch: int, num_samples: int) -> None:
        """Make the next iteration an iteration of `epoch` that skips the first `num_samples` of the stream."""
        self.set_epoch(epoch)
        self._skip = num_samples

    @property
    def global_batch_size(self) -> int:
        """The number of samples that all ranks together use in one step."""
        return self.batch_size if self.shard.split == "global" else self.batch_size * self.shard.data_size

    @property
    def local_batch_size(self) -> int:
        """The number of samples that a rank uses in one step."""
        return self.global_batch_size // self.shard.data_size

    def __len__(self) -> int:
        length = len(self.dataset)  # type: ignore[arg-type]
        num_batches = length // self.batch_size if self.drop_last else -(-length // self.batch_size)
        return self.shard.num_steps(num_batches) * self.local_batch_size

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        worker_id, num_workers = (worker.id, worker.num_workers) if worker else (0, 1)
        rng = SeededRNG(derive_seed(self._seed.value, self._loader_index, self._epoch, self._num_iterations))
        num_samples_to_skip = self._skip if not self._num_iterations else 0
        self._num_iterations += 1
        beginning: list[Any] = []
        with rng.drawing():
            stream = iter(self.dataset)
            if num_samples_to_skip >= self.global_batch_size:
                first, local, size = self._read_global_batch(stream, keep=True)
                beginning = local or first
                num_samples_to_skip -= size
            for _ in islice(stream, num_samples_to_skip):
                pass
        for step in count():
            mine = step % num_workers == worker_id
            with rng.drawing():
                first, local, size = self._read_global_batch(stream, mine or not step)
            beginning = beginning or local or first
            if size == self.global_batch_size or self._is_full(size):
                yield from local if mine else ()
            elif mine:
                yield from self._remainder(beginning, first, local, step, size)
            if size < self.global_batch_size:
                return

    def _read_global_batch(self, stream: Iterator[Any], keep: bool) -> tuple[list[Any], list[Any], int]:
        """Read a global batch. Return its first batch, this rank's samples (both empty unless `keep`) and its size."""
        rank, data_size = self.shard.data_rank, self.shard.data_size
        first: list[Any] = []
        local: list[Any] = []
        size = 0
        for index in range(self.global_batch_size // self.batch_size):
            batch = list(islice(stream, self.batch_size))
            if self.drop_last and len(batch) < self.batch_size:
                break
            size += len(batch)
            if keep and not index:
                first = batch
            if keep and self.shard.split == "global":
                local = batch[rank::data_size]
            elif keep and index == rank:
                local = batch
        return first, local, size

    def _is_full(self, size: int) -> bool:
        """Return whether `size` samples give every rank a batch, even if that of the last rank is smaller."""
        return self.shard.split == "batch" and -(-size // self.batch_size) == self.shard.data_size

    def _remainder(
        self, beginning: list[Any], first: list[Any], local: list[Any], step: int, size: int
    ) -> Iterable[Any]:
        """Return this rank's samples of the last global batch, which is too small to give every rank a batch."""
        if not size:
            return []
        if self.shard.remainder == "pad":
            return local or [PaddingBatch(sample) for sample in first[: self.local_batch_size]]
        if self.shard.split == "global":
            missing = -(-size // self.shard.data_size) - len(local)
            return local + beginning[:missing]
        if self.shard.remainder == "wrap":
            return local or beginning
        if not step and not self._skip:
            raise too_few_batches(self.dataset, self.shard.data_size)
        return []


class _EpochForwarder:
    """An endless sampler for the `DataLoader`, which passes Lightning's `set_epoch` on to the dataset."""

    def __init__(self, dataset: ShardedIterable) -> None:
        self._dataset = dataset

    def __iter__(self) -> Iterator[None]:
        while True:
            yield None

    def set_epoch(self, epoch: int) -> None:
        self._dataset.set_epoch(epoch)
