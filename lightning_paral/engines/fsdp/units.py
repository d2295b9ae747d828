"""What is done with the tensors of a unit before it is sharded."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn import Module, Parameter

from lightning_paral.comm.coalescing import broadcast
from lightning_paral.compat.torch.fsdp import can_be_sharded
from lightning_paral.errors import ConfigurationError
from lightning_paral.model.units import Unit, Units, partition

SMALL_BYTES = 25 * 2**20  # the size of a bucket of DDP
_SMALL_PART = 16


def leave_small_to_root(units: Units) -> Units:
    """Leave units to the root that are less than a 16th of the module, unless together they have more than 25 MiB.

    They stay units as well if the root would then have trained parameters of several dtypes, which is an error.

    The root is unsharded throughout a step. A unit of a few kilobytes saves less memory than its all-gathers cost time.
    """
    num_bytes = sum(unit.num_bytes for unit in units.bottom_up)
    small = {unit.module for unit in units.inner if _is_small(unit, num_bytes)}
    if sum(unit.num_bytes for unit in units.inner if unit.module in small) > SMALL_BYTES:
        return units
    fewer = partition(units.root.module, {unit.module for unit in units.inner} - small)
    return units if len(_trained_dtypes(fewer.root)) > 1 else fewer


def _is_small(unit: Unit, num_bytes: int) -> bool:
    return unit.num_bytes < num_bytes / _SMALL_PART and not isinstance(unit.module, FSDPModule)  # sharded by the user


def unshardable_parameters(module: Module, num_shards: int) -> list[Parameter]:
    """Return the parameters of `module` that cannot be sharded: 0-dimensional and empty ones, and uneven complex ones.

    Before torch 2.12, integer parameters cannot be sharded either.
    """

    def cannot_be_sharded(parameter: Parameter) -> bool:
        is_empty = parameter.dim() == 0 or parameter.numel() == 0
        # torch's Adam steps on `view_as_real`, which is a copy of a DTensor with uneven shards (torch 2.13).
        is_uneven = parameter.is_complex() and not is_empty and parameter.shape[0] % num_shards > 0
        return is_empty or not (isinstance(parameter, DTensor) or (can_be_sharded(parameter) and not is_uneven))

    return [parameter for parameter in module.parameters() if cannot_be_sharded(parameter)]


def broadcast_on(device: torch.device, tensors: Iterable[Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Broadcast a unit's `tensors` from the first rank of `group` on `device`, before the unit is sharded there.

    This communicates over the network of the devices, and needs no more device memory than FSDP2 needs for the unit.

    *Collective* over `group`; `None` is the world.
    """
    tensors = list(tensors)
    move_or_allocate(device, tensors, is_source=dist.get_rank(group) == 0)
    broadcast(tensors, group)


@torch.no_grad()
def move_or_allocate(device: torch.device, tensors: Iterable[Tensor], *, is_source: bool) -> None:
    """Move `tensors` to `device` if this rank is the source. Otherwise only allocate memory there for their values.

    Parameters are reallocated on the other ranks even if `device` is the CPU, because `from_pretrained` may have mapped
    them privately from a file. A page of such a mapping, once written to, stays in memory as long as the file is
    mapped, so that each rank would end up with the full model in memory.
    """
    for tensor in tensors:
        if is_source:
            tensor.data = tensor.data.to(device)
        elif device.type != "cpu" or isinstance(tensor, Parameter):
            tensor.data = torch.empty_like(tensor.data, device=device)


def check_dtypes(unit: Unit, names: dict[Any, str]) -> None:
    """Raise a `ConfigurationError` if the trained parameters of `unit`, which have `names`, have different dtypes."""
    trained = _trained_dtypes(unit)
    if len(trained) > 1:
        found = ", ".join(f"{names[one]} ({str(dtype).removeprefix('torch.')})" for dtype, one in trained.items())
        raise ConfigurationError(
            f"Trained parameters of one unit must have the same dtype, but in {unit.name or 'the root'} there are "
            f"{found}. Convert them, or choose units=[...] so that they are in different units."
        )


def _trained_dtypes(unit: Unit) -> dict[torch.dtype, Parameter]:
    """Return the dtypes of the trained parameters of `unit` that can be sharded, each with the first parameter."""
    trained: dict[torch.dtype, Parameter] = {}
    for parameter in unit.parameters:
        if parameter.requires_grad and parameter.dim() > 0 and parameter.numel() > 0:
            trained.setdefault(parameter.dtype, parameter)
    return trained
