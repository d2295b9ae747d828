"""DTensors: local tensor and layout, operations that work on shards, and the cache of sharding propagation."""

from collections.abc import Callable
from operator import attrgetter
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Shard
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.distributed.tensor.placement_types import _StridedShard

from lightning_paral.compat.private_name import Names

NAMES: Names = {
    "torch.distributed.tensor.DTensor": {
        "_local_tensor": "write to this rank's shard",
    },
    "torch.distributed.tensor.placement_types": {
        "_StridedShard(split_factor)": "save and load tensors that FSDP2 shards after tensor parallelism",
    },
    "torch.distributed.device_mesh.DeviceMesh": {
        "_get_root_mesh": "find the ranks outside of a mesh that hold the same tensors",
    },
    "torch.distributed.tensor.debug": {
        "_clear_sharding_prop_cache": "make DTensor forget the meshes of destroyed process groups",
    },
}


# The local tensor of a DTensor

local_of: Callable[[Any], Tensor] = attrgetter("_local_tensor")
"""Return the local tensor of a DTensor, not a view of it."""


# How FSDP2 shards a tensor that tensor parallelism has already sharded, and from which mesh a mesh is a slice


def sharded_dim(placement: Placement) -> int | None:
    """Return the dimension of a tensor that a placement shards; `None` if it shards none."""
    return int(placement.dim) if isinstance(placement, Shard | _StridedShard) else None


def split_factor(placement: Placement) -> int:
    """Return into how many shards later dimensions of the mesh have divided the dimension that a placement shards.

    They did so before the dimension of the mesh that has this placement. It is 1 for an ordinary `Shard`.
    """
    return int(placement.split_factor) if isinstance(placement, _StridedShard) else 1


def root_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh from which `mesh` was sliced; `mesh` itself if it is no slice."""
    return mesh._get_root_mesh()


# DTensor's cache of sharding propagation, which outlives the process groups of its meshes


def forget_meshes() -> None:
    """Clear DTensor's cache, which contains meshes.

    The result of an operation gets the cached mesh of the first operation with the same layouts (torch 2.13). Meshes
    find their groups by name: after the default group has been replaced, these names are unknown or refer to different
    groups.
    """
    _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]
