"""After an exception: find out whether all ranks failed, and make a group in which they can communicate."""

import uuid
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from lightning_paral.compat.torch.process_groups import default_store
from lightning_paral.distributed.store_exchange import exchange_in_store

PATIENCE = timedelta(seconds=10)
"""How long the ranks that failed wait for the others."""

_ALL, _SOME = "all", "some"


@dataclass(frozen=True)
class ReachableRanks:
    """Whether all ranks can be reached, and by which group."""

    all_reachable: bool
    group: dist.ProcessGroup | None = None
    """After a failure, a new gloo group of all ranks: in older groups, collectives of some ranks may be pending."""


def new_run_name() -> str:
    """Return a name that no other run has."""
    return uuid.uuid4().hex


def wait_for_all_ranks(run: str, timeout: timedelta) -> ReachableRanks:
    """Wait at most `PATIENCE` until all ranks call this. *Collective*, but returns if some rank does not call it.

    A rank that fails alone leaves the others in a collective that never ends, so the ranks wait through the store. The
    first rank to know the outcome writes it there: a rank that comes too late would find the keys of all others.

    Args:
        run: the name of the run that failed, the same on all ranks.
        timeout: of collectives in the new group.
    """
    world_size = dist.get_world_size()
    if world_size == 1:
        return ReachableRanks(all_reachable=True)
    try:
        present = exchange_in_store(f"failed/{run}", "here", PATIENCE)
        outcome = _ALL if len(present) == world_size else _SOME
        if default_store().compare_set(f"lightning_paral/failed/{run}/outcome", "", outcome) != _ALL.encode():
            return ReachableRanks(all_reachable=False)
        return ReachableRanks(all_reachable=True, group=dist.new_group(backend="gloo", timeout=timeout))
    except (dist.DistError, RuntimeError):  # rank 0, which serves the store, has ended
        return ReachableRanks(all_reachable=False)
