"""Exchange small values between the ranks of a group through host memory, without waiting for a device."""

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from lightning_paral.distributed.process_group import host_group

T = TypeVar("T")


def any_rank(flag: bool, group: dist.ProcessGroup | None = None) -> bool:
    """Return whether `flag` is true on any rank of `group`. *Collective* over `group`."""
    return _reduce(flag, dist.ReduceOp.MAX, group)


def every_rank(flag: bool, group: dist.ProcessGroup | None = None) -> bool:
    """Return whether `flag` is true on every rank of `group`. *Collective* over `group`."""
    return _reduce(flag, dist.ReduceOp.MIN, group)


def _reduce(flag: bool, op: Any, group: dist.ProcessGroup | None) -> bool:
    # On CPU, because reading the result from a GPU would wait for all work queued on it.
    tensor = torch.tensor(int(flag), device="cpu")
    dist.all_reduce(tensor, op=op, group=group or host_group())
    return bool(tensor)


def gather_ints(number: int, group: dist.ProcessGroup | None = None) -> list[int]:
    """Return the `number` of each rank of `group`, ordered by rank. *Collective* over `group`."""
    return [number for (number,) in gather_int_lists([number], group)]


def gather_int_lists(numbers: Sequence[int], group: dist.ProcessGroup | None = None) -> list[list[int]]:
    """Return the `numbers` of each rank of `group`, ordered by rank, in one collective. *Collective* over `group`.

    All ranks must give the same number of 64-bit integers.
    """
    local = torch.tensor(numbers, dtype=torch.int64, device="cpu")
    gathered = [torch.zeros_like(local) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, local, group=group or host_group())
    return torch.stack(gathered).tolist()


def gather_objects(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return the value of each rank of `group`, ordered by rank. *Collective* over `group`.

    Values must be picklable. Without a process group, return this process's value only.
    """
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def broadcast_from_first_rank(value: T, group: dist.ProcessGroup | None = None) -> T:
    """Return the `value` that rank 0 of `group` passes. It must be picklable. *Collective* over `group`."""
    shared = [value]
    dist.broadcast_object_list(shared, group_src=0, group=group or host_group())
    return shared[0]
