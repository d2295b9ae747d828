"""Who is what: how the ranks of a run are arranged, which draw samples of their own, and which hold the same."""

import math
import weakref
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lightning_paral.compat.torch.process_groups import is_alive
from lightning_paral.compat.torch.sharding_cache import forget_meshes
from lightning_paral.distributed.agreement import RankGroup
from lightning_paral.distributed.process_group import host_group
from lightning_paral.errors import ConfigurationError

SHARD = "data_parallel"
"""The one dimension of a mesh without replicas; also what Lightning calls it."""
HYBRID = ("data_parallel_replicate", "data_parallel_shard")


_default_of_meshes: "weakref.ref[dist.ProcessGroup] | None" = None
_groups: "weakref.WeakValueDictionary[tuple[int, ...], dist.ProcessGroup]" = weakref.WeakValueDictionary()


@dataclass(frozen=True, kw_only=True)
class ParallelDims:
    """The dimensions along which the ranks of a run are arranged, and where this rank is.

    The order is pipeline, replicate, shard, tensor, from the outermost to the innermost dimension: ranks that differ
    only in their tensor coordinate are neighbours. Ranks that differ only in their tensor or pipeline coordinate work
    on the same samples, and have the same *data rank*.

    Raises:
        ValueError: a size is below 1, or `rank` is not below the product of the sizes.
    """

    rank: int = 0
    """This process's rank among all of the run."""

    replicate: int = 1
    """Number of copies of the model. Ranks that differ in this coordinate alone hold the same shards."""

    shard: int = 1
    """Number of ranks that parameters, gradients or optimizer state of a copy are sharded over."""

    tensor: int = 1
    """Number of ranks that compute each layer together."""

    pipeline: int = 1
    """Number of stages: groups of ranks with consecutive layers."""

    def __post_init__(self) -> None:
        if min(self.sizes) < 1 or not 0 <= self.rank < self.num_ranks:
            raise ValueError(f"rank {self.rank} does not exist among {self}")

    def __str__(self) -> str:
        names = ("stages", "replicas", "shards", "tensor ranks")
        shape = [f"{size} {name}" for size, name in zip(self.sizes, names, strict=True) if size > 1]
        return " x ".join(shape) or "1 replica"

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """The sizes, from the outermost to the innermost dimension: pipeline, replicate, shard, tensor."""
        return self.pipeline, self.replicate, self.shard, self.tensor

    @property
    def num_ranks(self) -> int:
        """The number of ranks of the run."""
        return math.prod(self.sizes)

    @property
    def data_size(self) -> int:
        """How many ranks draw samples of their own."""
        return self.replicate * self.shard

    @property
    def data_rank(self) -> int:
        """Which of the `data_size` shares of the samples this rank draws."""
        return self.rank // self.tensor % self.data_size

    @property
    def stage(self) -> int:
        """This rank's pipeline stage, from 0."""
        return self.rank // (self.data_size * self.tensor)

    @property
    def data_ranks(self) -> list[int]:
        """The ranks that differ from this one in their data rank alone, in the order of data ranks."""
        first = self.stage * self.data_size * self.tensor + self.rank % self.tensor
        return [first + data_rank * self.tensor for data_rank in range(self.data_size)]

    @property
    def stages(self) -> list[int]:
        """The pipeline stage of each rank of the run."""
        return [rank // (self.data_size * self.tensor) for rank in range(self.num_ranks)]

    @property
    def stage_ranks(self) -> list[int]:
        """The ranks of this rank's stage, which hold the same unsharded tensors."""
        num_ranks = self.data_size * self.tensor
        return list(range(self.stage * num_ranks, (self.stage + 1) * num_ranks))

    def data_group(self) -> dist.ProcessGroup | None:
        """Return the group of `data_ranks`, made at first use; `None`, the default group, if these are all ranks.

        *Collective* over `data_ranks`.
        """
        return None if self.data_size == self.num_ranks else _group_of(self.data_ranks)

    def data_rank_group(self) -> RankGroup:
        """Return this rank among its `data_ranks`, in a group that carries host tensors and objects.

        *Collective* over `data_ranks`.
        """
        if self.data_size == 1:
            return RankGroup()
        group = host_group() if self.data_size == self.num_ranks else self.data_group()
        return RankGroup(self.data_rank, self.data_size, group)

    def stage_group(self) -> dist.ProcessGroup | None:
        """Return the group of `stage_ranks`, made at first use; `None`, the default group, if these are all ranks.

        *Collective* over `stage_ranks`.
        """
        return None if self.pipeline == 1 else _group_of(self.stage_ranks)


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
