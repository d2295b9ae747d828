"""Distribute the loader of a map-style dataset: every rank draws the same order of batches and loads its own."""

import copy
import dataclasses
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import Any
from zlib import crc32

import numpy as np
from torch.utils.data import BatchSampler, Dataset, Subset

from lightning_paral.compat.lightning.samplers import IndexBatchSampler
from lightning_paral.compat.torch.loaders import copy_without_workers
from lightning_paral.data.global_order import GlobalOrder, Seed
from lightning_paral.data.loader import Loader, samplers, with_iteration
from lightning_paral.data.padding import MaybeUneven, PaddingBatch
from lightning_paral.data.sampler import RankBatchSampler, ShardSpec, too_few_batches
from lightning_paral.distributed.exchange import Facts, broadcast_from_first_rank, check_same
from lightning_paral.errors import ConfigurationError

_SAME_DATA = (
    "Every rank must have the same dataset and draw the same batches, and keeps its part of them. What is random must "
    "be the same on all ranks: call seed_everything() first, or give it a generator with a seed, as in "
    "random_split(..., generator=torch.Generator().manual_seed(0)). If ranks are meant to have different data, or the "
    "sampler divides it itself, set Trainer(use_distributed_sampler=False)."
)


def distribute_map_style(
    loader: Loader,
    shard: ShardSpec,
    seed: Seed,
    loader_index: int,
    *,
    shared_rng: bool,
    predicting: bool,
    several_ranks: bool,
) -> tuple[Loader, RankBatchSampler]:
    """Return a copy of `loader` that yields this rank's batches, and the sampler of the copy.

    Starting to iterate over the copy is *collective* over all ranks: they compare the first batches of their orders.
    Ranks that differ only in their tensor or pipeline coordinate take part, because they must draw the same batches.

    Args:
        loader: the user's loader. It is not changed.
        shard: which batches this rank draws.
        seed: the seed of the orders of the run.
        loader_index: the index among the loaders of the same Lightning stage.
        shared_rng: whether to start from the states of the global random generators, as a single process does, not from
            `seed`.
        predicting: whether the loader is for `trainer.predict`. If so, an incomplete last batch is kept, and prediction
            writers can read the indices of each batch.
        several_ranks: whether the run has several ranks, which must draw the same order.

    Raises:
        ConfigurationError: the batches of a training loader cannot be divided as `shard` says.
    """
    batches: Any = loader.batch_sampler if loader.batch_sampler is not None else loader.sampler
    if predicting and getattr(batches, "drop_last", False):
        batches = copy.copy(batches)
        batches.drop_last = False  # as Lightning does
    facts = _facts_of(loader.dataset, f"The loader's {type(loader.dataset).__name__}") if several_ranks else {}
    order = GlobalOrder(
        batches=batches,
        seed=seed,
        loader_index=loader_index,
        batched=loader.batch_sampler is not None,
        compare=partial(_check_same_data, facts, batches.sampler if type(batches) is BatchSampler else batches)
        if several_ranks
        else None,
        shared=shared_rng,
        broadcast=broadcast_from_first_rank if several_ranks else None,
        samplers=samplers(loader),
    )
    if shard.remainder != "pad":
        _check_training(order, shard, loader.batch_size)
    elif not order.batched:
        shard = dataclasses.replace(shard, split="batch")
    sampler = RankBatchSampler(order, shard)
    distributed = _with_sampler(loader, sampler)
    if predicting and order.batched:
        # Prediction writers read the indices of batches from it.
        distributed.__dict__["batch_sampler"] = IndexBatchSampler(sampler)
    return distributed, sampler


def _with_sampler(loader: Loader, sampler: RankBatchSampler) -> Loader:
    if not sampler.order.batched:
        changed = copy_without_workers(loader, sampler=sampler)
    elif sampler.shard.split == "global" and loader.batch_size is not None:
        local_batch_size = -(-loader.batch_size // sampler.shard.data_size)
        changed = copy_without_workers(loader, batch_sampler=sampler, batch_size=local_batch_size)
    else:
        changed = copy_without_workers(loader, batch_sampler=sampler)
    return with_iteration(changed, partial(_mark_padding, sampler)) if sampler.shard.may_need_padding else changed


def _mark_padding(sampler: RankBatchSampler, batches: Iterator[Any], restart: object) -> Iterator[Any]:
    """Yield `batches`. Mark padding batches, and batches of steps in which ranks have different numbers of samples."""
    for step, batch in enumerate(batches):
        if step in sampler.padding_steps:
            yield PaddingBatch(batch)
        elif step in sampler.uneven_steps or step in sampler.loss_weights:
            some_have_none, weight = step in sampler.uneven_steps, sampler.loss_weights.get(step, 1.0)
            yield MaybeUneven(batch, some_have_none, weight, not some_have_none or sampler.had_larger_batches)
        else:
            yield batch


def _check_same_data(facts: Facts, sampler: object, first_batches: str) -> None:
    """Raise a `ConfigurationError` if the ranks have other data or another order. *Collective* over all ranks."""
    check_same({**facts, (f"The {type(sampler).__name__}", "first draws"): first_batches}, _SAME_DATA)


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


def _check_training(order: GlobalOrder, shard: ShardSpec, batch_size: int | None) -> None:
    """Raise a `ConfigurationError` if training batches cannot be divided as `shard` says."""
    num_batches = order.num_batches()
    if shard.split == "global" and not order.batched:
        raise ConfigurationError(
            "split='global' divides the batches of the training loader, but it has batch_size=None and leaves batching "
            "to its dataset. Give it a batch size, or set split='batch'."
        )
    if shard.split == "global" and batch_size is not None and batch_size < shard.data_size:
        raise ConfigurationError(
            f"split='global' divides each batch among {shard.data_size} ranks, but the training loader has "
            f"batch_size={batch_size}. Make it at least the number of ranks, or set split='batch'."
        )
    if num_batches and not shard.num_steps(num_batches):
        raise too_few_batches(order.batches, shard.data_size)
