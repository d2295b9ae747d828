"""Which ranks shard together and which replicate one another."""

import weakref

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lightning_paral.compat.torch.process_groups import is_alive
from lightning_paral.compat.torch.sharding_cache import forget_meshes
from lightning_paral.errors import ConfigurationError

SHARD = "data_parallel"
"""The one dimension of a mesh without replicas; also what Lightning calls it."""
HYBRID = ("data_parallel_replicate", "data_parallel_shard")


_default_of_meshes: "weakref.ref[dist.ProcessGroup] | None" = None
_groups: "weakref.WeakValueDictionary[tuple[int, ...], dist.ProcessGroup]" = weakref.WeakValueDictionary()


def check_replicate(replicate: int, world_size: int) -> None:
    """Raise a `ConfigurationError` if `world_size` ranks cannot make `replicate` equal shard groups."""
    if replicate < 1 or world_size % replicate:
        fitting = [str(count) for count in range(1, world_size + 1) if world_size % count == 0]
        arithmetic = (
            f": {world_size} / {replicate} = {world_size / replicate:.2f} ranks per shard group" if replicate else ""
        )
        raise ConfigurationError(
            f"replicate={replicate} does not divide the {world_size} ranks{arithmetic}. "
            f"Choose one of {', '.join(fitting)}; 1 shards over all ranks."
        )


def check_reshard(reshard_after_forward: bool | int | None, num_shards: int) -> None:
    """Raise a `ConfigurationError` if `reshard_after_forward` is a number that does not divide `num_shards`."""
    if isinstance(reshard_after_forward, bool) or reshard_after_forward is None:
        return
    if num_shards % reshard_after_forward:
        fitting = [str(count) for count in range(1, num_shards + 1) if num_shards % count == 0]
        raise ConfigurationError(
            f"reshard_after_forward={reshard_after_forward} does not divide the {num_shards} ranks that a copy of the "
            f"model is sharded over. Choose one of {', '.join(fitting)}, or True (over all) or False (not at all)."
        )


def make_mesh(device: torch.device, replicate: int) -> DeviceMesh:
    """Return the mesh of all ranks, sharded over all or in `replicate` groups of neighbours. *Collective* over all."""
    global _default_of_meshes
    world_size = dist.get_world_size()
    check_replicate(replicate, world_size)
    default = dist.group.WORLD
    assert default is not None
    if _default_of_meshes is None or _default_of_meshes() is not default:
        forget_meshes()
        _default_of_meshes = weakref.ref(default)
    if replicate == 1:
        return init_device_mesh(device.type, (world_size,), mesh_dim_names=(SHARD,))
    ranks = torch.arange(world_size, device="cpu").view(replicate, -1)
    row, column = divmod(dist.get_rank(), ranks.shape[1])
    groups = [_group_of(members.tolist()) for members in (ranks[:, column], ranks[row])]
    return DeviceMesh.from_group(groups, device.type, mesh=ranks, mesh_dim_names=HYBRID)


def _group_of(ranks: list[int]) -> dist.ProcessGroup:
    """Return the group of `ranks`, made at first use; it ends with the default group.

    DTensor keeps the first mesh of a shape (torch 2.13) and finds that mesh's groups by name. So the groups of a later
    fit in the same default group have to be the same.
    """
    group = _groups.get(tuple(ranks))
    if group is None or not is_alive(group):
        group = dist.new_group(ranks, use_local_synchronization=True, group_desc=f"lightning_paral: ranks {ranks}")
        assert group is not None
        _groups[tuple(ranks)] = group
    return group


def shard_ranks(mesh: DeviceMesh) -> list[int]:
    """Return the global ranks that together hold one copy of the model, this one among them, in the order of shards."""
    return dist.get_process_group_ranks(mesh.get_group(mesh.ndim - 1))
