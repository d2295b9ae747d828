"""After an exception: whether all ranks had one and are here, and a group on which those can go on."""

import uuid
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

PATIENCE = timedelta(seconds=10)
"""How long the ranks that failed wait for the others."""

_ALL, _SOME = "all", "some"


@dataclass(frozen=True)
class Meeting:
    """What ranks found that waited for each other after an exception."""

    all_here: bool
    group: dist.ProcessGroup | None = None
    """Of all ranks, on gloo. The groups of before may have collectives in them that were begun on some ranks only."""


def new_run_name() -> str:
    """Return a name no other run has."""
    return uuid.uuid4().hex


def meet(run: str, timeout: timedelta) -> Meeting:
    """Wait until all ranks call this, at most for `PATIENCE`.

    Ranks that fail alone leave the others in a collective that never ends, so whether all come is asked of the store.
    The first rank to know writes down the answer: one that comes too late would find all others to have been here.

    Args:
        run: a name that all ranks have for the run that failed.
        timeout: of collectives in the group.
    """
    world_size = dist.get_world_size()
    if world_size == 1:
        return Meeting(all_here=True)
    prefix = f"lightning_paral/failed/{run}"
    try:
        store = dist.distributed_c10d._get_default_store()
        keys = [f"{prefix}/{rank}" for rank in range(world_size)]
        store.set(keys[dist.get_rank()], "here")
        try:
            store.wait(keys, PATIENCE)
            found = _ALL
        except (dist.DistError, RuntimeError):
            found = _SOME
        if store.compare_set(f"{prefix}/found", "", found) != _ALL.encode():
            return Meeting(all_here=False)
        return Meeting(all_here=True, group=dist.new_group(backend="gloo", timeout=timeout))
    except (dist.DistError, RuntimeError):  # the store went with its process
        return Meeting(all_here=False)
