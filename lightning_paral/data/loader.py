"""A user's `DataLoader` with other batches: everything else about it stays, its class and its workers' settings."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, IterDataPipe

from lightning_paral.compat.torch.loaders import copy_without_workers, without_workers
from lightning_paral.data.iterable import EpochForwarder, ShardedIterable
from lightning_paral.data.padding import CollatePadding, MaybeUneven, PaddingBatch
from lightning_paral.data.sampler import RankBatchSampler

Loader = DataLoader[Any]


def is_distributed(loader: Loader) -> bool:
    """Whether a sampler of the loader knows about ranks itself: torch's, or one with its attributes."""
    return any(
        isinstance(sampler, DistributedSampler) or (hasattr(sampler, "num_replicas") and hasattr(sampler, "rank"))
        for sampler in samplers(loader)
    )


def is_stream(loader: Loader) -> bool:
    """Whether the dataset is iterated over, and not indexed."""
    return isinstance(loader.dataset, IterableDataset)


def shards_itself(loader: Loader) -> bool:
    """Whether torch divides the dataset among the ranks, as it does with data pipes."""
    return isinstance(loader.dataset, IterDataPipe)


def samplers(loader: Loader) -> tuple[Any, ...]:
    """Return every object that has a part in the order of the loader's batches."""
    found = [loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None), loader.sampler]
    return tuple({id(sampler): sampler for sampler in found if sampler is not None}.values())


def resumes_itself(loader: Loader) -> bool:
    """Whether the loader keeps its own position in checkpoints, as torchdata's `StatefulDataLoader` does."""
    return hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")


def with_sampler(loader: Loader, sampler: RankBatchSampler) -> Loader:
    """Return the loader with the batches of `sampler`, marked where they are fillers."""
    if not sampler.order.batched:
        changed = copy_without_workers(loader, sampler=sampler)
    elif sampler.shard.split == "global" and loader.batch_size is not None:
        part_size = -(-loader.batch_size // sampler.shard.world_size)
        changed = copy_without_workers(loader, batch_sampler=sampler, batch_size=part_size)
    else:
        changed = copy_without_workers(loader, batch_sampler=sampler)
    return with_iteration(changed, partial(mark_padding, sampler)) if sampler.shard.may_need_padding else changed


def mark_padding(sampler: RankBatchSampler, batches: Iterator[Any], restart: object) -> Iterator[Any]:
    """Yield `batches`, marked as `sampler` says."""
    for step, batch in enumerate(batches):
        yield (
            PaddingBatch(batch)
            if step in sampler.padding_steps
            else MaybeUneven(batch)
            if step in sampler.uneven_steps
            else batch
        )


def with_stream(loader: Loader, stream: ShardedIterable) -> Loader:
    """Return the loader with its dataset replaced by a rank's part of it."""
    forwarder = EpochForwarder(stream)
    changes: dict[str, Any] = {"dataset": stream, "sampler": forwarder, "drop_last": False}
    if loader.batch_size is not None:
        changes["batch_size"] = stream.part_size
        changes["batch_sampler"] = BatchSampler(forwarder, stream.part_size, drop_last=False)  # type: ignore[arg-type]
    if stream.shard.may_need_padding:
        changes["collate_fn"] = CollatePadding(loader.collate_fn)
    changed = copy_without_workers(loader, **changes)
    return with_iteration(changed, mark_maybe_uneven) if stream.shard.may_need_padding else changed


def mark_maybe_uneven(batches: Iterator[Any], restart: object = None) -> Iterator[Any]:
    """Yield `batches`, marked: where a stream ends is not known before."""
    for batch in batches:
        yield batch if isinstance(batch, PaddingBatch) else MaybeUneven(batch)


def strip_padding(batches: Iterator[Any], restart: object = None) -> Iterator[Any]:
    """Yield `batches` without fillers and without marks."""
    for batch in batches:
        if not isinstance(batch, PaddingBatch):
            yield batch.batch if isinstance(batch, MaybeUneven) else batch


def with_iteration(
    loader: Loader,
    iterate: Callable[[Iterator[Any], Callable[[], Iterator[Any]]], Iterator[Any]],
    num_batches: int | None = None,
) -> Loader:
    """Return the loader iterating through `iterate`, given its own iterator and what makes another of that.

    Args:
        loader: not changed.
        iterate: yields what the loader is to yield.
        num_batches: the loader's new length, if it is to have another.
    """
    changed = copy_without_workers(loader)
    changed.__class__ = _class_with(type(loader), iterate, num_batches)
    return changed


def _class_with(original: Any, iterate: Callable[..., Iterator[Any]], num_batches: int | None) -> Any:
    """Return a class that looks like `original` and iterates through `iterate`."""

    class Changed(original):  # type: ignore[misc]
        def __iter__(self) -> Iterator[Any]:
            def restart() -> Iterator[Any]:
                batches: Iterator[Any] = super(Changed, self).__iter__()
                return batches

            return iterate(restart(), restart)

        def __len__(self) -> int:
            return super().__len__() if num_batches is None else num_batches

        def __reduce_ex__(self, protocol: Any) -> Any:
            # pickle would find `original` under the name of this class.
            state = without_workers(super().__reduce_ex__(protocol)[2])
            return _made_anew, (original, iterate, num_batches), state

    Changed.__name__, Changed.__qualname__, Changed.__module__ = (
        original.__name__,
        original.__qualname__,
        original.__module__,
    )
    return Changed


def _made_anew(original: Any, iterate: Callable[..., Iterator[Any]], num_batches: int | None) -> Any:
    kind = _class_with(original, iterate, num_batches)
    return kind.__new__(kind)
