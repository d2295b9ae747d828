"""Keep ranks in step if an iterable dataset shards itself, because their streams may have different lengths."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_info

from lightning_paral.data.loader import Loader, with_iteration
from lightning_paral.data.padding import PaddingBatch, mark_maybe_uneven
from lightning_paral.data.sampler import ShardSpec
from lightning_paral.distributed.exchange import any_rank, every_rank, gather_ints

_END = object()


def synchronize_self_sharded(loader: Loader, shard: ShardSpec, group: dist.ProcessGroup | None) -> Loader:
    """Return a copy of `loader` that yields the same number of batches on every rank. *Collective* over `group`.

    Iterating over the copy is also *collective*, once per batch. With one data rank, return `loader` itself.
    """
    if shard.data_size == 1:
        return loader
    rank_zero_info(
        f"{type(loader.dataset).__name__} shards itself. Ranks may have different numbers of batches, so they agree "
        "before each batch whether to continue."
    )

    def iterate(batches: Any, restart: Callable[[], Any]) -> Any:
        synchronized = in_lockstep(
            batches, restart, shard, partial(any_rank, group=group), partial(every_rank, group=group)
        )
        return mark_maybe_uneven(synchronized) if shard.remainder == "pad" else synchronized

    try:
        length = len(loader)
    except TypeError:
        length = -1
    lengths = gather_ints(length, group)
    if min(lengths) < 0:
        return with_iteration(loader, iterate)
    return with_iteration(loader, iterate, min(lengths) if shard.remainder == "drop" else max(lengths))


def in_lockstep(
    batches: Iterator[Any],
    restart: Callable[[], Iterator[Any]],
    shard: ShardSpec,
    any_rank: Callable[[bool], bool],
    every_rank: Callable[[bool], bool],
) -> Iterator[Any]:
    """Yield the same number of batches on every rank. *Collective*, once per batch.

    With `shard.remainder="drop"`, all ranks stop when the first one runs out of batches. Otherwise they stop when the
    last one does. Until then, the others start over (`"wrap"`) or yield padding batches (`"pad"`).

    Args:
        batches: the batches of this rank.
        restart: a function that returns a new iterator over the batches of this rank.
        shard: only its `remainder` is used.
        any_rank: a function that returns whether a flag is true on any rank; *collective*.
        every_rank: a function that returns whether a flag is true on every rank; *collective*.
    """
    first_pass, last = True, None
    while True:
        batch = next(batches, _END)
        first_pass = first_pass and batch is not _END
        if not (every_rank(first_pass) if shard.remainder == "drop" else any_rank(first_pass)):
            return
        if batch is not _END:
            last = batch
        elif shard.remainder == "wrap":
            batches = restart()
            batch = next(batches, None)
        else:
            batch = PaddingBatch(last)
        yield batch
