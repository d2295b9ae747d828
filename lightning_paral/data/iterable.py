"""Distribute the loader of an iterable dataset: every rank reads the full stream and keeps its own batches."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, count, islice
from typing import Any, cast

from lightning.pytorch.utilities import rank_zero_info
from torch.utils.data import BatchSampler, IterableDataset, get_worker_info

from lightning_paral.compat.private_name import is_named_by
from lightning_paral.compat.torch.loaders import copy_without_workers, set_worker_info
from lightning_paral.data.global_order import Seed
from lightning_paral.data.loader import Loader, with_iteration
from lightning_paral.data.order_rng import SeededRNG
from lightning_paral.data.padding import (
    CollatePadding,
    CollateUneven,
    MaybeUneven,
    PaddingBatch,
    UnevenBatch,
    mark_maybe_uneven,
)
from lightning_paral.data.sampler import ShardSpec, reject_or_warn_about_repeated_sample, too_few_batches
from lightning_paral.distributed.rng_state import derive_seed
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
            "workers reads all of it, or the part that it yields by get_worker_info(), and keeps its share. If the "
            "dataset shards itself by rank, set shard_iterable=False."
        )
    dataset = cast(Iterable[Any], loader.dataset)
    stream = ShardedIterable(dataset, shard, batch_size, loader.drop_last, seed, loader_index)
    return with_stream(loader, stream), stream


def with_stream(loader: Loader, stream: "ShardedIterable") -> Loader:
    """Return a copy of `loader` that reads `stream` instead of its dataset."""
    forwarder, stream.num_workers = _EpochForwarder(stream), loader.num_workers
    changes: dict[str, Any] = {"dataset": stream, "sampler": forwarder, "drop_last": False}
    if loader.batch_size is not None:
        changes["batch_size"] = stream.local_batch_size
        changes["batch_sampler"] = BatchSampler(forwarder, stream.local_batch_size, drop_last=False)  # type: ignore[arg-type]
    if stream.shard.may_need_padding:
        changes["collate_fn"] = CollatePadding(loader.collate_fn)
        return with_iteration(copy_without_workers(loader, **changes), stream.mark_maybe_uneven)
    if stream.shard.split == "global" and stream.shard.data_size > 1:
        changes["collate_fn"] = CollateUneven(loader.collate_fn)
        return with_iteration(copy_without_workers(loader, **changes), stream.record_uneven)
    return copy_without_workers(loader, **changes)


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
        self.loss_weights: dict[int, float] = {}
        """With `split="global"`, the weight of this rank's mean loss in the mean over ranks, by step; 1 if missing."""
        self.shares: dict[int, tuple[int, int]] = {}
        """By step, what says how a batch is unequally divided, equal on all ranks: its size and its first data rank."""
        self.rejects_repeated_samples = False
        """Whether a training batch with fewer samples than ranks is an error."""
        self.has_warned = False
        """Whether a warning about a repeated sample was given."""
        self._num_finished_steps = 0  # of iterations of this epoch that have ended
        self._seed = seed
        self._loader_index = loader_index
        self._epoch = 0
        self._num_iterations = 0  # of this epoch, but of all epochs in persistent workers, which do not see `set_epoch`
        self._skip = 0
        self._saved: Mapping[str, int] = {}
        self.num_workers = 0
        """The number of workers of the loader."""

    @property
    def epoch(self) -> int:
        """The epoch of the next or current iteration."""
        return self._epoch

    def set_epoch(self, epoch: int) -> None:
        """Make `epoch` the epoch of the next iteration."""
        if epoch != self._epoch:
            self._epoch, self._skip, self._num_finished_steps = epoch, 0, 0
            self.loss_weights.clear()
            self.shares.clear()
        self._num_iterations = 0

    def resume(self, epoch: int, num_samples: int, saved: Mapping[str, int] | None = None) -> None:
        """Make the next iteration an iteration of `epoch` that skips the first `num_samples` of the stream.

        Args:
            epoch: the epoch.
            num_samples: the number of samples to skip.
            saved: the `"step_size"` and `"num_workers"` of the run that used them; `None` for those of this run.
        """
        self.set_epoch(epoch)
        self._skip, self._saved = num_samples, saved or {}

    def record_uneven(self, batches: Iterator[Any], restart: object = None) -> Iterator[Any]:
        """Yield `batches` without marks. Record how those of uneven steps are divided among the ranks."""
        step = self._num_finished_steps or self._skip // self.global_batch_size
        for batch in batches:
            if isinstance(batch, UnevenBatch):
                size = batch.num_samples
                self.shares[step] = size, 0
                self.loss_weights[step] = self._weight(size)
                if size < self.shard.data_size:
                    reject_or_warn_about_repeated_sample(self, size, self.shard.data_size)
                batch = batch.batch
            step += 1
            yield batch
        self._num_finished_steps = step

    def mark_maybe_uneven(self, batches: Iterator[Any], restart: object = None) -> Iterator[Any]:
        """Yield `batches`, marked as `MaybeUneven` unless they are padding, with the weights of uneven steps."""
        for batch in mark_maybe_uneven(batches):
            if isinstance(batch, MaybeUneven) and isinstance(batch.batch, UnevenBatch):
                uneven = batch.batch
                shows_constants = uneven.num_samples > self.shard.data_size or self.had_larger_batches
                yield MaybeUneven(uneven.batch, True, self._weight(uneven.num_samples), shows_constants)
            else:
                yield batch

    def _weight(self, num_samples: int) -> float:
        """Return this rank's number of samples, divided by the mean number, in a step of `num_samples`."""
        data_rank, data_size = self.shard.data_rank, self.shard.data_size
        return len(range(data_rank, num_samples, data_size)) * data_size / num_samples

    @property
    def had_larger_batches(self) -> bool:
        """Whether the batches before the last one had more samples than there are data ranks."""
        return self.global_batch_size > self.shard.data_size

    @property
    def global_batch_size(self) -> int:
        """The number of samples that all ranks together use in one step."""
        return self.batch_size if self.shard.split == "global" else self.batch_size * self.shard.data_size

    @property
    def local_batch_size(self) -> int:
        """The number of samples that a rank uses in one step."""
        return self.global_batch_size // self.shard.data_size

    def __len__(self) -> int:
        divides_itself = self.num_workers > 1 and is_named_by(type(self.dataset), "get_worker_info")
        if divides_itself and self.shard.split == "batch" and self.shard.data_size > 1:
            raise TypeError("The ranks divide the part of each worker, and may take more steps than for the whole.")
        length = len(self.dataset)  # type: ignore[arg-type]
        num_batches = length // self.batch_size if self.drop_last else -(-length // self.batch_size)
        return self.shard.num_steps(num_batches) * self.local_batch_size

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        worker = getattr(worker, "worker", worker)  # in a later epoch of a persistent worker
        worker_id, num_workers = (worker.id, worker.num_workers) if worker else (0, 1)
        rng = SeededRNG(derive_seed(self._seed.value, self._loader_index, self._epoch, self._num_iterations))
        num_samples_to_skip = self._skip if not self._num_iterations else 0
        self._num_iterations += 1
        beginning: list[Any] = []
        step_size = self._saved.get("step_size", self.global_batch_size)
        num_steps_to_skip = num_samples_to_skip // step_size
        info = _PartInfo(worker, (worker_id + num_steps_to_skip) % num_workers, self.dataset)
        if worker is not None:
            set_worker_info(info)
        with rng.drawing():
            stream = iter(self.dataset)
            stream = chain(list(islice(stream, 1)), stream)
            if info.was_asked:  # and so the stream is this worker's part, of which each batch counts
                num_samples_to_skip = len(range(info.id, num_steps_to_skip, num_workers)) * step_size
                worker_id, num_workers = 0, 1
            if num_samples_to_skip >= self.global_batch_size:
                first, local, size = self._read_global_batch(stream, keep=True)
                beginning = local or first
                num_samples_to_skip -= size
            num_missing = num_samples_to_skip - sum(1 for _ in islice(stream, num_samples_to_skip))
        had = self._saved.get("num_workers", self.num_workers)
        if info.was_asked and num_steps_to_skip and (had != self.num_workers or num_missing >= step_size):
            raise ConfigurationError(
                f"{type(self.dataset).__name__} divides itself by get_worker_info(). A run can continue inside an "
                f"epoch only with as many workers as before, num_workers={had} instead of {self.num_workers}, and only "
                "if none had come to its end. Resume from a checkpoint saved at the end of an epoch."
            )
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
        is_padding = self.shard.remainder == "pad"
        if is_padding and not local:
            return [PaddingBatch(sample) for sample in first[: self.local_batch_size]]
        if self.shard.split == "global":
            uneven = local or first[:1]  # a rank without a sample runs one of another rank
            return [UnevenBatch(sample, size) for sample in uneven] if size % self.shard.data_size else uneven
        if is_padding:
            return local
        if self.shard.remainder == "wrap":
            return local or beginning
        if not step and not self._skip:
            raise too_few_batches(self.dataset, self.shard.data_size)
        return []


class _PartInfo:
    """What `get_worker_info()` returns to a dataset. It notes whether the dataset asks for its part."""

    def __init__(self, worker: Any, part: int, dataset: Iterable[Any]) -> None:
        self.worker = worker
        self.dataset = dataset
        self.was_asked = False
        self._part = part

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # as copies are made, before there is a worker
            raise AttributeError(name)
        self.was_asked = self.was_asked or name in ("id", "num_workers")
        return self._part if name == "id" else getattr(self.worker, name)


class _EpochForwarder:
    """An endless sampler for the `DataLoader`, which passes Lightning's `set_epoch` on to the dataset."""

    def __init__(self, dataset: ShardedIterable) -> None:
        self._dataset = dataset

    def __iter__(self) -> Iterator[None]:
        while True:
            yield None

    def set_epoch(self, epoch: int) -> None:
        self._dataset.set_epoch(epoch)
