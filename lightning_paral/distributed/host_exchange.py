"""Exchange small values between all ranks of the run."""

from typing import Any, TypeVar

import torch
import torch.distributed as dist

from lightning_paral.distributed.process_group import host_group

T = TypeVar("T")


def any_rank(flag: bool) -> bool:
    """Return whether `flag` is true on any rank. *Collective* over the world; does not wait for devices."""
    return _reduce(flag, dist.ReduceOp.MAX)


def every_rank(flag: bool) -> bool:
    """Return whether `flag` is true on every rank. *Collective* over the world; does not wait for devices."""
    return _reduce(flag, dist.ReduceOp.MIN)


def _reduce(flag: bool, op: Any) -> bool:
    # On the host: reading the result from a device would wait for everything queued there.
    tensor = torch.tensor(int(flag), device="cpu")
    dist.all_reduce(tensor, op=op, group=host_group())
    return bool(tensor)


def gather_ints(number: int) -> list[int]:
    """Return the `number` of each rank, ordered by rank. *Collective* over the world; does not wait for devices."""
    local = torch.tensor([number], device="cpu")
    gathered = [torch.zeros_like(local) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, local, group=host_group())
    return [int(each) for each in gathered]


def gather_objects(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return the picklable `value` of each rank of `group`, ordered by rank. *Collective* over `group`.

    Without a process group, return this process's value only.
    """
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def broadcast_from_rank_0(value: T) -> T:
    """Return rank 0's picklable `value` on all ranks. *Collective* over the world."""
    shared = [value]
    dist.broadcast_object_list(shared, src=0, group=host_group())
    return shared[0]
