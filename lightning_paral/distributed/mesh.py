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

from lightning_paral.compat.torch.dtensor import forget_meshes
from lightning_paral.compat.torch.process_groups import is_alive, new_named_group
from lightning_paral.distributed.exchange import RankGroup
from lightning_paral.errors import ConfigurationError

SHARD = "data_parallel"
"""Name of the only dimension of a mesh without replicas, as in Lightning."""
HYBRID = ("data_parallel_replicate", "data_parallel_shard")
"""Names of the dimensions of a mesh with replicas."""
TENSOR = "tensor_parallel"
"""Name of the last dimension of a mesh with tensor ranks, as in Lightning."""

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

    The first ranks are the last stage, where a step computes and logs its results: what user code does on rank 0 only,
    such as printing, is therefore done with these results.

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
        return self.stages[self.rank]

    @property
    def stages(self) -> list[int]:
        """The pipeline stage of each global rank."""
        return [self.pipeline - 1 - rank // (self.data_size * self.tensor) for rank in range(self.num_ranks)]

    @property
    def shards(self) -> list[int]:
        """For each global rank, a number that is equal on the ranks that hold the same shards of the same stage."""
        num_shards = self.shard * self.tensor
        return [stage * num_shards + rank % num_shards for rank, stage in enumerate(self.stages)]

    @property
    def data_ranks(self) -> list[int]:
        """The global ranks that differ from this one at most in their data rank, ordered by data rank."""
        return self.ranks_along(1, 2)

    @property
    def stage_ranks(self) -> list[int]:
        """The global ranks of this rank's pipeline stage. They hold the same unsharded tensors."""
        return self.ranks_along(1, 2, 3)

    @property
    def replica_ranks(self) -> list[int]:
        """The global ranks of this rank's pipeline stage that together hold one replica of its part of the model."""
        return self.ranks_along(2, 3)

    @property
    def pipeline_ranks(self) -> list[int]:
        """The global ranks that differ from this one at most in their pipeline stage, ordered by stage."""
        return self.ranks_along(0)[::-1]

    def ranks_along(self, *dims: int) -> list[int]:
        """Return the global ranks that differ from this one at most in `dims`, which are indices of `sizes`."""
        strides = [math.prod(self.sizes[dim + 1 :]) for dim in range(len(self.sizes))]
        found = [self.rank]
        for dim in dims:
            size, stride = self.sizes[dim], strides[dim]
            found = [rank + (place - rank // stride % size) * stride for rank in found for place in range(size)]
        return found

    def data_group(self) -> dist.ProcessGroup | None:
        """Return the process group of `data_ranks`, or `None`, for the default group, if these are all ranks.

        The group is created at first use. *Collective* over `data_ranks`.
        """
        return self._group_of(self.data_ranks)

    def data_rank_group(self) -> RankGroup:
        """Return the `RankGroup` of `data_ranks`, whose process group supports CPU tensors and objects.

        The process group is created at first use. *Collective* over `data_ranks`.
        """
        return RankGroup() if self.data_size == 1 else RankGroup(self.data_rank, self.data_size, self.data_group())

    def group_for_only(self, purpose: str, timeout: timedelta) -> dist.ProcessGroup | None:
        """Return a gloo group of `data_ranks` for CPU tensors that is used for one purpose; `None` without gloo.

        The group is created at first use. *Collective* over `data_ranks`.
        """
        backends = dist.get_backend_config().split(",")
        if "gloo" not in backends and "cpu:gloo" not in backends:
            return None
        return _get_group(self.data_ranks, (purpose, timeout))

    def stage_group(self) -> dist.ProcessGroup | None:
        """Return the process group of `stage_ranks`, or `None`, for the default group, if these are all ranks.

        The group is created at first use. *Collective* over `stage_ranks`.
        """
        return self._group_of(self.stage_ranks)

    def replica_group(self) -> dist.ProcessGroup | None:
        """Return the process group of `replica_ranks`, or `None`, for the default group, if these are all ranks.

        The group is created at first use. *Collective* over `replica_ranks`.
        """
        return self._group_of(self.replica_ranks)

    def replicate_group(self) -> dist.ProcessGroup | None:
        """Return the process group of the ranks that hold the same shard of the same stage; `None` if these are all.

        The group is created at first use. *Collective* over these ranks.
        """
        return self._group_of(self.ranks_along(1))

    def _group_of(self, ranks: list[int]) -> dist.ProcessGroup | None:
        return None if len(ranks) == self.num_ranks else _get_group(ranks)

    def new_pipeline_group(self, purpose: str) -> dist.ProcessGroup:
        """Create a process group of `pipeline_ranks` that is used for one purpose in one run. *Collective* over them.

        A failed run may leave messages behind, which a later run in the same group would receive.
        """
        return _new_group(f"{purpose}, ranks {self.pipeline_ranks}", self.pipeline_ranks)


def check_divides(given: str, count: int, total: int, of: str, hint: str) -> None:
    """Raise a `ConfigurationError` if `count` does not divide `total`.

    Args:
        given: the option and its value, such as `replicate=3`.
        count: the number of equal groups, or of the members of each.
        total: the number to divide.
        of: what is divided, such as `ranks`.
        hint: what to say after the numbers that would do.
    """
    if count < 1 or total % count:
        fitting = ", ".join(str(number) for number in range(1, total + 1) if total % number == 0)
        raise ConfigurationError(f"{given} does not divide the {total} {of}. Choose one of {fitting}; {hint}.")


def make_mesh(device: torch.device, dims: ParallelDims) -> DeviceMesh:
    """Return the device mesh of the ranks of this rank's pipeline stage. *Collective* over them.

    Its dimensions are the replicas, if there are several, the shards, and the tensor ranks, if there are several: each
    of `dims.replicate` groups of consecutive ranks holds one replica of the model.
    """
    global _mesh_default_group
    default = dist.group.WORLD
    assert default is not None
    if _mesh_default_group is None or _mesh_default_group() is not default:
        forget_meshes()
        _mesh_default_group = weakref.ref(default)
    if dims.shard == dims.num_ranks:
        return init_device_mesh(device.type, (dims.num_ranks,), mesh_dim_names=(SHARD,))
    names = {1: HYBRID[0], 2: SHARD if dims.replicate == 1 else HYBRID[1], 3: TENSOR}
    present = [dim for dim in names if dim == 2 or dims.sizes[dim] > 1]
    ranks = torch.tensor(dims.stage_ranks, device="cpu").view([dims.sizes[dim] for dim in present])
    groups = [_get_group(dims.ranks_along(dim)) for dim in present]
    return DeviceMesh.from_group(groups, device.type, mesh=ranks, mesh_dim_names=tuple(names[dim] for dim in present))


def data_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the part of `mesh` without the dimension of the tensor ranks."""
    assert mesh.mesh_dim_names is not None
    names = tuple(name for name in mesh.mesh_dim_names if name != TENSOR)
    return mesh if len(names) == mesh.ndim else mesh[names]


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
        if only is None:
            group = _new_group(f"ranks {ranks}", ranks)
        else:
            group = _new_group(f"{only[0]}, ranks {ranks}", ranks, timeout=only[1], backend="gloo")
        _groups[key] = group
    return group


def _new_group(name: str, ranks: list[int], **options: Any) -> dist.ProcessGroup:
    count = _num_created.setdefault(dist.group.WORLD, Counter())
    count[name] += 1
    return new_named_group(f"{name}, number {count[name]}", ranks, **options)
