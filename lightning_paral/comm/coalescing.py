"""Treat many tensors together: group, broadcast or average them, in few messages or operations."""

from collections.abc import Iterable, Sequence
from itertools import accumulate, groupby
from operator import itemgetter

import torch
import torch.distributed as dist
from torch import Tensor

LARGE_BYTES = 1024 * 1024
"""Tensors of at least this size are broadcast one by one; smaller ones are coalesced."""
_REDUCED_BYTES = 25 * 1024 * 1024
"""About the size of what is reduced at once, which needs as much memory."""


@torch.no_grad()
def broadcast(tensors: Iterable[Tensor], group: dist.ProcessGroup | None = None, source: int = 0) -> None:
    """Broadcast `tensors` from rank `source` of `group` to its other ranks, in place. *Collective* over `group`.

    Tensors are sent as bytes, so that tensors of different dtypes can share a message. As under DDP, version counters
    do not change, so the backward pass of an earlier forward pass can still run.

    Args:
        tensors: tensors with the same shapes, dtypes and device types, in the same order, on all ranks.
        group: the ranks that take part; `None` for all ranks.
        source: the rank in `group` that has the values.
    """
    for bucket in _buckets(tensors):
        flat = _as_bytes(bucket[0]) if len(bucket) == 1 else torch.cat([_as_bytes(tensor) for tensor in bucket])
        dist.broadcast(flat, group_src=source, group=group)
        if dist.get_rank(group) == source:
            continue
        parts = torch.split(flat, [tensor.numel() * tensor.element_size() for tensor in bucket])
        for tensor, part in zip(bucket, parts, strict=True):
            _write(tensor, part)


def _buckets(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Group `tensors` of the same device into buckets of about `LARGE_BYTES`. Each large tensor has its own bucket."""
    buckets: list[list[Tensor]] = []
    open_buckets: dict[torch.device, tuple[list[Tensor], int]] = {}
    for tensor in tensors:
        nbytes = tensor.numel() * tensor.element_size()
        if nbytes >= LARGE_BYTES:
            buckets.append([tensor])
        elif nbytes:
            bucket, size = open_buckets.get(tensor.device, ([], 0))
            if not bucket or size >= LARGE_BYTES:
                bucket, size = [], 0
                buckets.append(bucket)
            bucket.append(tensor)
            open_buckets[tensor.device] = (bucket, size + nbytes)
    return buckets


def _as_bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of `tensor`, as a view if it is contiguous."""
    return tensor.data.contiguous().view(-1).view(torch.uint8)


def _write(tensor: Tensor, received: Tensor) -> None:
    if not tensor.is_contiguous():
        # Clone, because the bytes of a tensor inside a bucket may not be aligned for its dtype.
        tensor.data.copy_(received.clone().view(tensor.dtype).view(tensor.shape))
    elif received.data_ptr() != tensor.data_ptr():
        _as_bytes(tensor).copy_(received)


@torch.no_grad()
def all_reduce_mean(tensors: Sequence[Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Replace `tensors` with their means over the ranks of `group`, in place. *Collective* over `group`.

    Args:
        tensors: tensors with the same shapes, dtypes and device types, in the same order, on all ranks.
        group: the ranks that take part; `None` for all ranks.
    """
    num_ranks = dist.get_world_size(group)
    for similar in group_by_dtype_and_device(tensor for tensor in tensors if tensor.numel()):
        ends = accumulate(tensor.numel() * tensor.element_size() for tensor in similar)
        numbered = zip((end // _REDUCED_BYTES for end in ends), similar, strict=True)
        for _, pairs in groupby(numbered, key=itemgetter(0)):
            bucket = [tensor for _, tensor in pairs]
            flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
            dist.all_reduce(flat, group=group)
            means = torch.split(flat.div_(num_ranks), [tensor.numel() for tensor in bucket])
            for tensor, mean in zip(bucket, means, strict=True):
                tensor.copy_(mean.view_as(tensor))


def group_by_dtype_and_device(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Group `tensors` by dtype and device. Groups are in the order of their first tensors."""
    groups: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    return list(groups.values())
