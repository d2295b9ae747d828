"""Find out after an exception whether all ranks failed, and create a group in which they can still communicate."""

import uuid
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from lightning_paral.compat.torch.process_groups import default_store
from lightning_paral.distributed.store_exchange import exchange_in_store

PATIENCE = timedelta(seconds=3)
"""How long a rank that failed waits for the others."""

_ALL, _SOME = "all", "some"


@dataclass(frozen=True)
class ReachableRanks:
    """Whether all ranks can be reached, and the group in which to reach them."""

    all_reachable: bool
    group: dist.ProcessGroup | None = None
    """A new gloo group of all ranks, because collectives may still be pending in older groups. `None`, for the default
    group, if nothing failed."""


def new_run_name() -> str:
    """Return a unique name for a run."""
    return uuid.uuid4().hex


def wait_for_all_ranks(run: str, timeout: timedelta, *, has_died: bool = False) -> ReachableRanks:
    """Wait at most `PATIENCE` until all ranks call this. *Collective*, but returns if some rank does not call it.

    If one rank fails alone, the others may hang in a collective, so the ranks wait through the store instead. The first
    rank to know the outcome writes it to the store, and all ranks return this outcome. Otherwise a rank that arrives
    late would find the keys of all ranks, and conclude that all can be reached.

    Args:
        run: the name of the failed run, the same on all ranks.
        timeout: the timeout of collectives in the new group.
        has_died: whether the process of a rank has died, so that waiting is useless.
    """
    world_size = dist.get_world_size()
    if world_size == 1:
        return ReachableRanks(all_reachable=True)
    if has_died:
        return ReachableRanks(all_reachable=False)
    try:
        present = exchange_in_store(f"failed/{run}", "here", PATIENCE)
        outcome = _ALL if len(present) == world_size else _SOME
        if default_store().compare_set(f"lightning_paral/failed/{run}/outcome", "", outcome) != _ALL.encode():
            return ReachableRanks(all_reachable=False)
        return ReachableRanks(all_reachable=True, group=dist.new_group(backend="gloo", timeout=timeout))
    except (dist.DistError, RuntimeError):  # rank 0, which serves the store, has ended
        return ReachableRanks(all_reachable=False)
