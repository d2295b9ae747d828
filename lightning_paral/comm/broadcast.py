"""Broadcast many tensors from rank 0 in few messages."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_paral.distributed.process_group import group_for

LARGE_BYTES = 1024 * 1024
"""Tensors of at least this size are broadcast one by one; smaller ones are coalesced."""


@torch.no_grad()
def broadcast(tensors: Iterable[Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Broadcast `tensors` from the first rank of `group` to its other ranks, in place. *Collective* over `group`.

    Tensors are sent as bytes, so that different dtypes can share a message. Version counters do not change, as under
    DDP: the graph of an earlier forward pass can still run backward.

    Args:
        tensors: the same shapes, dtypes and device types on all ranks, in the same order.
        group: ranks that take part; `None` for all ranks of the run.
    """
    for bucket in _buckets(tensors):
        flat = _bytes_of(bucket[0]) if len(bucket) == 1 else torch.cat([_bytes_of(tensor) for tensor in bucket])
        dist.broadcast(flat, group_src=0, group=group_for(flat) if group is None else group)
        if dist.get_rank(group) == 0:
            continue
        parts = torch.split(flat, [tensor.numel() * tensor.element_size() for tensor in bucket])
        for tensor, part in zip(bucket, parts, strict=True):
            _write(tensor, part)


def _buckets(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Group `tensors` by device: each large one by itself, the others in buckets of about `LARGE_BYTES`."""
    buckets: list[list[Tensor]] = []
    of_device: dict[torch.device, tuple[list[Tensor], int]] = {}
    for tensor in tensors:
        nbytes = tensor.numel() * tensor.element_size()
        if nbytes >= LARGE_BYTES:
            buckets.append([tensor])
        elif nbytes:
            bucket, size = of_device.get(tensor.device, ([], 0))
            if not bucket or size >= LARGE_BYTES:
                bucket, size = [], 0
                buckets.append(bucket)
            bucket.append(tensor)
            of_device[tensor.device] = (bucket, size + nbytes)
    return buckets


def _bytes_of(tensor: Tensor) -> Tensor:
    """Return the bytes of `tensor`, as a view if it is contiguous."""
    return tensor.data.contiguous().view(-1).view(torch.uint8)


def _write(tensor: Tensor, received: Tensor) -> None:
    if not tensor.is_contiguous():
        # Clone, because bytes inside a bucket may not be aligned for a larger dtype.
        tensor.data.copy_(received.clone().view(tensor.dtype).view(tensor.shape))
    elif received.data_ptr() != tensor.data_ptr():
        _bytes_of(tensor).copy_(received)
