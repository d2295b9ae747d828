"""Whether, at the end of a run, the ranks can bring together what each of them holds."""

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from lightning_paral.distributed.failure import ReachableRanks
from lightning_paral.distributed.mesh import shard_ranks
from lightning_paral.engines.fsdp.snapshot import Gather
from lightning_paral.model.host_memory_check import host_memory_shortage


def gather_over(mesh: DeviceMesh, num_bytes: int, num_local_ranks: int) -> Gather | str:
    """Return the way to gather `num_bytes`, or why not: some host has no room for that on each of its ranks.

    *Collective* over the world.
    """
    lack = host_memory_shortage(num_bytes, num_local_ranks)
    if lack is not None:
        return lack
    group = mesh.get_group(mesh.ndim - 1)
    return Gather(group, list(range(dist.get_world_size(group))))


def gather_after_failure(mesh: DeviceMesh, reachable: ReachableRanks) -> Gather | str:
    """Return a way to gather if all ranks failed and are here, or that some are elsewhere."""
    if not reachable.all_reachable:
        return "the run failed on some of its ranks only"
    group = reachable.group or dist.group.WORLD
    assert group is not None
    return Gather(group, shard_ranks(mesh), on_host=True)
