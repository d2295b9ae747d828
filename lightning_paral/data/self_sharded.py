"""Iterable datasets that shard themselves: keep the ranks in step, as their streams may have different lengths."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_info

from lightning_paral.data.loader import Loader, with_iteration
from lightning_paral.data.padding import PaddingBatch, mark_maybe_uneven
from lightning_paral.data.sampler import ShardSpec
from lightning_paral.distributed.host_exchange import any_rank, every_rank, gather_ints

_END = object()


def synchronize_self_sharded(loader: Loader, shard: ShardSpec, group: dist.ProcessGroup | None) -> Loader:
    """Return a copy of `loader` that yields equally many batches on every rank. *Collective* over `group`.

    Iterating the copy is *collective*, too, once per batch.
    """
    if shard.data_size == 1:
        return loader
    rank_zero_info(
        f"{type(loader.dataset).__name__} is left to shard itself. Its ranks may end unevenly, so they agree at "
        "each batch whether to go on."
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
    """Yield equally many batches on every rank. *Collective*, once per batch.

    With `shard.remainder="drop"` all ranks stop when the first one runs out. Otherwise they stop when the last one
    does; until then the others start over (`"wrap"`) or yield padding batches (`"pad"`).

    Args:
        batches: of this rank.
        restart: returns a new iterator over the batches of this rank.
        shard: its `remainder` is used.
        any_rank: returns whether a flag is true on any rank; *collective*.
        every_rank: returns whether a flag is true on every rank; *collective*.
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
