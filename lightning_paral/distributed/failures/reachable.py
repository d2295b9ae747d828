"""Find out after an exception which ranks failed, and create groups in which they can still communicate."""

import uuid
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from lightning_paral.distributed.failures.survivors import (
    Savers,
    StepPosition,
    choose_savers,
    find_survivors,
    make_group,
)

PATIENCE = timedelta(seconds=10)
"""How long a rank that failed waits for the others. It does not wait for those that are known to have died."""


@dataclass(frozen=True)
class ReachableRanks:
    """Whether all ranks can be reached, the group in which to reach them, and the ranks that may save."""

    all_reachable: bool
    group: dist.ProcessGroup | None = None
    """A new gloo group of all ranks, because collectives may still be pending in older groups. `None`, for the default
    group, if nothing failed."""
    savers: Savers | None = None
    """The ranks that save together; `None` if nothing failed, for all ranks."""
    savers_group: dist.ProcessGroup | None = None
    """A new gloo group of the savers; `None` if there is one saver at most, and on other ranks."""


def new_run_name() -> str:
    """Return a unique name for a run."""
    return uuid.uuid4().hex


def wait_for_ranks(
    run: str,
    position: StepPosition,
    shards: Sequence[int],
    timeout: timedelta,
    *,
    dead: Callable[[], Collection[int]] = tuple,
) -> ReachableRanks:
    """Wait at most `PATIENCE` until all ranks call this. *Collective*, but returns if some rank does not call it.

    If one rank fails alone, the others may hang in a collective, so the ranks wait through the store instead. The first
    rank to know the outcome writes it to the store, and all ranks return this outcome. Otherwise a rank that arrives
    late would find the keys of all ranks, and conclude that all can be reached.

    Args:
        run: the name of the failed run, the same on all ranks.
        position: the last completed step of this rank. Only ranks with the same position save together.
        shards: for each global rank, a number that is equal on the ranks that have the same shards.
        timeout: the timeout of collectives in the new groups.
        dead: returns the global ranks that are known to have died.
    """
    world_size = dist.get_world_size()
    if world_size == 1:
        return ReachableRanks(all_reachable=True, savers=choose_savers({0: position}, [0]))
    rank = dist.get_rank()
    try:
        positions = find_survivors(run, position, PATIENCE, dead)
        savers = choose_savers(positions, shards)
        all_reachable = len(positions) == world_size
        group = make_group(run, range(world_size), timeout) if all_reachable else None
        if len(savers.ranks) == world_size:
            return ReachableRanks(all_reachable, group, savers, group)
        return ReachableRanks(
            all_reachable, group, savers, make_group(run, savers.ranks, timeout) if rank in savers.ranks else None
        )
    except (dist.DistError, RuntimeError):
        reason = "the process that serves the store, usually rank 0, ended, so that the other ranks cannot agree"
        return ReachableRanks(all_reachable=False, savers=Savers(reason=reason))
