"""Whether, at the end of a run, the ranks can bring together what each of them holds."""

import uuid
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from lightning_paral.fsdp.belongings import Gather
from lightning_paral.fsdp.mesh import shard_ranks
from lightning_paral.model.room import lack_of_room

PATIENCE = timedelta(seconds=10)


def new_run_name() -> str:
    """Return a name no other run has."""
    return uuid.uuid4().hex


def gather_over(mesh: DeviceMesh, num_bytes: int, num_local_ranks: int) -> Gather | str:
    """Return the way to gather `num_bytes`, or why not: some host has no room for that on each of its ranks.

    *Collective* over the world.
    """
    lack = lack_of_room(num_bytes, num_local_ranks)
    if lack is not None:
        return lack
    group = mesh.get_group(mesh.ndim - 1)
    return Gather(group, list(range(dist.get_world_size(group))))


def gather_after_failure(mesh: DeviceMesh, run: str) -> Gather | str:
    """Return a way to gather if all ranks failed and are here, or that some are elsewhere.

    Ranks that fail alone leave the others in a collective that never ends, so whether all come is asked of the store,
    with a limit of `PATIENCE`, and what is left unfinished in the old groups is avoided with a new one.
    """
    store = dist.distributed_c10d._get_default_store()
    keys = [f"lightning_paral/failed/{run}/{rank}" for rank in range(dist.get_world_size())]
    try:
        store.set(keys[dist.get_rank()], "here")
        store.wait(keys, PATIENCE)
        group = dist.new_group(backend="gloo", timeout=3 * PATIENCE)
    except (dist.DistError, RuntimeError):
        return "the run failed on some of its ranks only"
    return Gather(group, shard_ranks(mesh), on_host=True)
