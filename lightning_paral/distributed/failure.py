"""After an exception: find out whether all ranks failed, and make a group in which they can go on."""

import uuid
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from lightning_paral.compat.torch.process_groups import default_store

PATIENCE = timedelta(seconds=10)
"""How long the ranks that failed wait for the others."""

_ALL, _SOME = "all", "some"


@dataclass(frozen=True)
class Meeting:
    """The outcome of waiting for the other ranks after an exception."""

    all_here: bool
    group: dist.ProcessGroup | None = None
    """A gloo group of all ranks. In earlier groups, collectives that only some ranks began may be pending."""


def new_run_name() -> str:
    """Return a name no other run has."""
    return uuid.uuid4().hex


def meet(run: str, timeout: timedelta) -> Meeting:
    """Wait until all ranks call this, at most for `PATIENCE`.

    A rank that fails alone leaves the others in a collective that never ends. So the ranks meet through the store, and
    the first to know the outcome writes it there: a rank that came too late would find the keys of all the others.

    Args:
        run: a name that all ranks have for the run that failed.
        timeout: of collectives in the group.
    """
    world_size = dist.get_world_size()
    if world_size == 1:
        return Meeting(all_here=True)
    prefix = f"lightning_paral/failed/{run}"
    try:
        store = default_store()
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
    except (dist.DistError, RuntimeError):  # rank 0, which serves the store, has ended
        return Meeting(all_here=False)
