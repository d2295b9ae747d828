"""How the ranks of a run are arranged: which of them draw different samples, and which hold the same tensors."""

import math
import weakref
from collections import Counter
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lightning_paral.compat.torch.group_names import new_named_group
from lightning_paral.compat.torch.process_groups import is_alive
from lightning_paral.compat.torch.sharding_cache import forget_meshes
from lightning_paral.distributed.agreement import RankGroup
from lightning_paral.distributed.process_group import host_group
from lightning_paral.errors import ConfigurationError

SHARD = "data_parallel"
"""Name of the only dimension of a mesh without replicas, as in Lightning."""
HYBRID = ("data_parallel_replicate", "data_parallel_shard")
"""Names of the dimensions of a mesh with replicas."""

_mesh_default_group: "weakref.ref[dist.ProcessGroup] | None" = None
"""The default group at the time of the last `make_mesh`. DTensor's cached meshes belong to it."""
_num_created: "weakref.WeakKeyDictionary[Any, Counter[str]]" = weakref.WeakKeyDictionary()
"""By default group, how many groups were created under a name."""
_groups: "weakref.WeakValueDictionary[tuple[Any, ...], dist.ProcessGroup]" = weakref.WeakValueDictionary()


@dataclass(frozen=True, kw_only=True)
class ParallelDims:
    """The dimensions of the array in which the ranks of a run are arranged, and the rank of this process.

    From the outermost to the innermost, the dimensions are pipeline, replicate, shard and tensor. Ranks that differ
    only in their tensor coordinate are therefore consecutive. Ranks that differ only in their tensor or pipeline
    coordinate work on the same samples: they have the same *data rank*.

    Raises:
        ValueError: a size is below 1, or `rank` is negative or not below the product of the sizes.
    """

    rank: int = 0
    """The global rank of this process."""

    replicate: int = 1
    """Number of replicas of the model. Ranks that differ only in this coordinate hold the same shards."""

    shard: int = 1
    """Number of ranks over which the parameters, gradients or optimizer state of a replica are sharded."""

    tensor: int = 1
    """Number of ranks that compute each layer together."""

    pipeline: int = 1
    """Number of pipeline stages. Each holds consecutive layers of the model."""

    def __post_init__(self) -> None:
        if min(self.sizes) < 1 or not 0 <= self.rank < self.num_ranks:
            raise ValueError(f"Sizes must be positive, and rank must be in range(product of sizes), but got {self!r}.")

    def __str__(self) -> str:
        names = ("stages", "replicas", "shards", "tensor ranks")
        shape = [f"{size} {name}" for size, name in zip(self.sizes, names, strict=True) if size > 1]
        return " x ".join(shape) or "1 replica"

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """The sizes of the dimensions, from the outermost to the innermost: pipeline, replicate, shard, tensor."""
        return self.pipeline, self.replicate, self.shard, self.tensor

    @property
    def num_ranks(self) -> int:
        """The world size: the product of the sizes."""
        return math.prod(self.sizes)

    @property
    def data_size(self) -> int:
        """The number of ranks that draw different samples."""
        return self.replicate * self.shard

    @property
    def data_rank(self) -> int:
        """The position of this rank among the ranks that draw different samples, from 0 to `data_size - 1`."""
        return self.rank // self.tensor % self.data_size

    @property
    def stage(self) -> int:
        """This rank's pipeline stage, from 0."""
        return self.rank // (self.data_size * self.tensor)

    @property
    def data_ranks(self) -> list[int]:
        """The global ranks that differ from this one at most in their data rank, ordered by data rank."""
        first = self.stage * self.data_size * self.tensor + self.rank % self.tensor
        return [first + data_rank * self.tensor for data_rank in range(self.data_size)]

    @property
    def stages(self) -> list[int]:
        """The pipeline stage of each global rank."""
        return [rank // (self.data_size * self.tensor) for rank in range(self.num_ranks)]

    @property
    def shards(self) -> list[int]:
        """For each global rank, a number that is equal on the ranks that hold the same shards of the same stage."""
        num_shards = self.shard * self.tensor
        return [stage * num_shards + rank % num_shards for rank, stage in enumerate(self.stages)]

    @property
    def stage_ranks(self) -> list[int]:
        """The global ranks of this rank's pipeline stage. They hold the same unsharded tensors."""
        num_ranks = self.data_size * self.tensor
        return list(range(self.stage * num_ranks, (self.stage + 1) * num_ranks))

    def data_group(self) -> dist.ProcessGroup | None:
        """Return the process group of `data_ranks`, or `None`, for the default group, if these are all ranks.

        The group is created at first use. *Collective* over `data_ranks`.
        """
        return None if self.data_size == self.num_ranks else _get_group(self.data_ranks)

    def data_rank_group(self) -> RankGroup:
        """Return the `RankGroup` of `data_ranks`, whose process group supports CPU tensors and objects.

        The process group is created at first use. *Collective* over `data_ranks`.
        """
        if self.data_size == 1:
            return RankGroup()
        group = host_group() if self.data_size == self.num_ranks else self.data_group()
        return RankGroup(self.data_rank, self.data_size, group)

    def group_for_only(self, purpose: str, timeout: timedelta) -> dist.ProcessGroup | None:
        """Return a gloo group of `data_ranks` for CPU tensors that is used for one purpose; `None` without gloo.

        The group is created at first use. *Collective* over `data_ranks`.
        """
        backends = dist.get_backend_config().split(",")
        if "gloo" not in backends and "cpu:gloo" not in backends and host_group() is None:
            return None
        return _get_group(self.data_ranks, (purpose, timeout))

    def stage_group(self) -> dist.ProcessGroup | None:
        """Return the process group of `stage_ranks`, or `None`, for the default group, if these are all ranks.

        The group is created at first use. *Collective* over `stage_ranks`.
        """
        return None if self.pipeline == 1 else _get_group(self.stage_ranks)


def check_replicate(replicate: int, world_size: int) -> None:
    """Raise a `ConfigurationError` if `world_size` ranks cannot be divided into `replicate` equal shard groups."""
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
            f"reshard_after_forward={reshard_after_forward} does not divide the {num_shards} ranks over which a "
            f"replica is sharded. Choose one of {', '.join(fitting)}, or True (over all) or False (not at all)."
        )


def make_mesh(device: torch.device, replicate: int) -> DeviceMesh:
    """Return the device mesh of all ranks. *Collective* over all ranks.

    It has one dimension if `replicate` is 1. Otherwise it has two: each of `replicate` groups of consecutive ranks
    shards one replica of the model.

    Raises:
        ConfigurationError: the world size is not divisible by `replicate`.
    """
    global _mesh_default_group
    world_size = dist.get_world_size()
    check_replicate(replicate, world_size)
    default = dist.group.WORLD
    assert default is not None
    if _mesh_default_group is None or _mesh_default_group() is not default:
        forget_meshes()
        _mesh_default_group = weakref.ref(default)
    if replicate == 1:
        return init_device_mesh(device.type, (world_size,), mesh_dim_names=(SHARD,))
    ranks = torch.arange(world_size, device="cpu").view(replicate, -1)
    row, column = divmod(dist.get_rank(), ranks.shape[1])
    groups = [_get_group(members.tolist()) for members in (ranks[:, column], ranks[row])]
    return DeviceMesh.from_group(groups, device.type, mesh=ranks, mesh_dim_names=HYBRID)


def _get_group(ranks: list[int], only: tuple[str, timedelta] | None = None) -> dist.ProcessGroup:
    """Return the process group of the global `ranks`, created at first use and destroyed with the default group.

    DTensor caches the first mesh of each shape and looks up the groups of that mesh by name (torch 2.13). Therefore a
    later fit in the same default group must use the same groups.

    Args:
        ranks: the ranks.
        only: if given, return a gloo group for this purpose, with this timeout.
    """
    key = (*ranks, only)
    group = _groups.get(key)
    if group is None or not is_alive(group):
        name = f"{'' if only is None else f'{only[0]}, '}ranks {ranks}"
        count = _num_created.setdefault(dist.group.WORLD, Counter())
        count[name] += 1
        group = new_named_group(
            f"{name}, number {count[name]}",
            ranks,
            timeout=None if only is None else only[1],
            backend=None if only is None else "gloo",
        )
        _groups[key] = group
    return group


def shard_ranks(mesh: DeviceMesh) -> list[int]:
    """Return the global ranks that together hold this rank's replica of the model, in the order of their shards."""
    return dist.get_process_group_ranks(mesh.get_group(mesh.ndim - 1))
