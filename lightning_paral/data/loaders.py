"""Copies of a user's `DataLoader` that yield this rank's batches, but keep their class name and worker settings.

A batch of an uneven step is marked, which a `Collate` carries from the samples of a stream to their batch.
"""

import copy
import dataclasses
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from typing import Any
from zlib import crc32

import numpy as np
from lightning.fabric.utilities.seed import pl_worker_init_function
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset

from lightning_paral.compat.lightning.loops import IndexBatchSampler
from lightning_paral.compat.torch.loaders import copy_without_workers, without_workers
from lightning_paral.data.sampler import GlobalOrder, Mark, RankBatchSampler, Seed, ShardSpec
from lightning_paral.distributed.mesh import ParallelDims
from lightning_paral.errors import ConfigurationError
from lightning_paral.options import Sampling

Loader = DataLoader[Any]


# Marked batches


@dataclass(frozen=True)
class Marked:
    """A batch, or a sample of one, and how its step is divided. The loop takes off the mark before the user's code."""

    batch: Any
    mark: Mark

    def pin_memory(self) -> "Marked":
        """Return the same with tensors in pinned memory, for loaders with `pin_memory=True`."""
        if hasattr(self.batch, "pin_memory"):
            return dataclasses.replace(self, batch=self.batch.pin_memory())
        pinned = apply_to_collection(self.batch, Tensor, Tensor.pin_memory, allow_frozen=True)
        return dataclasses.replace(self, batch=pinned)


@dataclass(frozen=True)
class Collate:
    """Wraps a `collate_fn` so that a batch of marked samples has their mark."""

    collate: Callable[[Any], Any]

    def __call__(self, samples: Any) -> Any:
        """Return the batch of `samples`, which is a single sample with `batch_size=None`."""
        if isinstance(samples, Marked):
            return dataclasses.replace(samples, batch=self.collate(samples.batch))
        if isinstance(samples, list) and samples and isinstance(samples[-1], Marked):
            users = [sample.batch if isinstance(sample, Marked) else sample for sample in samples]
            return dataclasses.replace(samples[-1], batch=self.collate(users))
        return self.collate(samples)


# Copies


def samplers(loader: Loader) -> tuple[Any, ...]:
    """Return the objects that determine the order of the loader's batches, without duplicates."""
    found = [loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None), loader.sampler]
    return tuple({id(sampler): sampler for sampler in found if sampler is not None}.values())


def seed_workers_by_data_rank(loader: Loader, dims: ParallelDims) -> Loader:
    """Return a copy of `loader` whose workers draw random numbers of their data rank.

    Those of the first data rank are those of one process. After `seed_everything(workers=True)`, Lightning seeds
    workers by the global rank if the loader has no `worker_init_fn`.
    """
    init = loader.worker_init_fn
    if dims.data_rank or (init is None and int(os.environ.get("PL_SEED_WORKERS", 0))):
        init = partial(_seed_worker, dims.data_rank, init)
    return copy_without_workers(loader, worker_init_fn=init)


def _seed_worker(data_rank: int, users: Callable[[int], None] | None, worker_id: int) -> None:
    pl_worker_init_function(worker_id, data_rank)
    if users is not None:
        users(worker_id)


def with_iteration(
    loader: Loader, iterate: Callable[[Iterator[Any]], Iterator[Any]], num_batches: int | None = None
) -> Loader:
    """Return a copy of `loader` whose iterators are made by `iterate`.

    Args:
        loader: the user's loader, or such a copy. It is not changed.
        iterate: called with an iterator of the loader; returns an iterator of the copy.
        num_batches: the length of the copy; `None` for that of the loader.
    """
    layers = (*vars(loader).get("paral_iterations", ()), iterate)
    length = vars(loader).get("paral_length") if num_batches is None else num_batches
    changed = copy_without_workers(loader, paral_iterations=layers, paral_length=length)
    users: Any = type(loader)
    changed.__class__ = _iterated(getattr(users, "paral_users", users))
    return changed


class Batches(Iterator[Any]):
    """The batches of a loader, which can start over, in workers that have the same settings."""

    def __init__(self, make: Callable[[], Iterator[Any]]) -> None:
        self._make, self._batches = make, make()

    def __next__(self) -> Any:
        return next(self._batches)

    def start_over(self) -> None:
        """Continue with the first batch."""
        self._batches = self._make()


@cache
def _iterated(users: Any) -> Any:
    """Return a subclass of the user's class, with the same name, that iterates as `with_iteration` says."""

    class Iterated(users):  # type: ignore[misc]
        paral_users = users

        def __iter__(self) -> Iterator[Any]:
            batches: Iterator[Any] = Batches(super().__iter__)
            for iterate in self.paral_iterations:
                batches = iterate(batches)
            return batches

        def __len__(self) -> int:
            length: int = super().__len__() if self.paral_length is None else self.paral_length
            return length

        def __reduce_ex__(self, protocol: Any) -> Any:
            # pickle looks up classes by name, and would find the user's instead of this class.
            return _new, (users,), without_workers(super().__reduce_ex__(protocol)[2])

    for name in ("__name__", "__qualname__", "__module__"):
        setattr(Iterated, name, getattr(users, name))
    return Iterated


def _new(users: Any) -> Any:
    changed = _iterated(users)
    return changed.__new__(changed)


def distribute_map_style(
    loader: Loader, shard: ShardSpec, seed: Seed, loader_index: int, num_ranks: int, *, predicting: bool
) -> tuple[Loader, RankBatchSampler]:
    """Return a copy of `loader` that yields this rank's batches, and the sampler of the copy.

    Starting to iterate over the copy is *collective* over all ranks: they compare the first batches of their orders.
    Ranks that differ only in their tensor or pipeline coordinate take part, because they must draw the same batches.

    Args:
        loader: the user's loader. It is not changed.
        shard: which batches this rank draws.
        seed: the seed of the orders of the run.
        loader_index: the index among the loaders of the same Lightning stage.
        num_ranks: the number of ranks, which all draw the same order.
        predicting: whether the loader is for `trainer.predict`. If so, batches are not divided, an incomplete last one
            is kept, and prediction writers can read the indices of each batch.

    Raises:
        ConfigurationError: the batches of a training loader cannot be divided as `shard` says.
    """
    batches: Any = loader.batch_sampler if loader.batch_sampler is not None else loader.sampler
    if predicting and getattr(batches, "drop_last", False):
        batches = copy.copy(batches)
        batches.drop_last = False  # as Lightning does
    order = GlobalOrder(
        batches=batches,
        seed=seed,
        loader_index=loader_index,
        batched=loader.batch_sampler is not None,
        shared=draws_as_one_process(shard, shard.data_size),
        samplers=samplers(loader),
        facts=_facts_of(loader.dataset, f"The loader's {type(loader.dataset).__name__}") if num_ranks > 1 else None,
    )
    small = not order.batched or (loader.batch_size is not None and loader.batch_size < shard.data_size)
    if small and shard.split == "global" and shard.remainder != "pad":
        raise ConfigurationError(
            f"split='global' divides each batch among {shard.data_size} ranks, but the training loader has "
            f"batch_size={loader.batch_size}. Make it at least the number of ranks, or set split='batch'."
        )
    if predicting or not order.batched:
        shard = dataclasses.replace(shard, split="batch")
    sampler = RankBatchSampler(order, shard)
    changes: dict[str, Any] = {"batch_sampler" if order.batched else "sampler": sampler}
    if order.batched and shard.split == "global" and loader.batch_size is not None:
        changes["batch_size"] = -(-loader.batch_size // shard.data_size)
    distributed = copy_without_workers(loader, **changes)
    if shard.may_need_padding:
        distributed = with_iteration(distributed, partial(_with_marks, sampler))
    if predicting and order.batched:
        # Prediction writers read the indices of batches from it.
        distributed.__dict__["batch_sampler"] = IndexBatchSampler(sampler)
    return distributed, sampler


def draws_as_one_process(sampling: Sampling | ShardSpec, data_size: int) -> bool:
    """Return whether the order of samples is drawn from the global random generators, as in a single process."""
    return sampling.split == "global" or data_size == 1


def _with_marks(sampler: RankBatchSampler, batches: Iterator[Any]) -> Iterator[Any]:
    for step, batch in enumerate(batches):
        yield Marked(batch, sampler.marks[step]) if step in sampler.marks else batch


def _facts_of(dataset: Any, subject: str, depth: int = 4) -> dict[tuple[str, str], str]:
    """Return the lengths of a dataset and of those that it holds, and the indices of a `Subset` if they are numbers."""
    facts = {}
    with suppress(TypeError, NotImplementedError):
        facts[subject, "has length"] = str(len(dataset))
    with suppress(ValueError):
        indices = np.asarray(dataset.indices if isinstance(dataset, Subset) else None)
        if indices.dtype.kind in "iu":
            facts[subject, "has indices"] = f"{indices[:8].tolist()}... (checksum {crc32(indices.tobytes())})"
    held = getattr(dataset, "datasets", [getattr(dataset, "dataset", None)])
    for number, each in enumerate(held if isinstance(held, list | tuple) else ()):
        if isinstance(each, Dataset) and depth:
            facts |= _facts_of(each, f"{subject}, its {type(each).__name__} {number}", depth - 1)
    return facts
