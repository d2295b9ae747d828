"""Giving all ranks rank 0's values of many tensors in few broadcasts."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_paral.distributed.process_group import group_for

LARGE_BYTES = 1024 * 1024
"""From this size on a tensor is broadcast by itself, smaller ones together."""


@torch.no_grad()
def broadcast(tensors: Iterable[Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Give all ranks of `group` the values of its first rank, in place. *Collective* over `group`; `None` is the world.

    Tensors travel as bytes, so those of all dtypes go together. Their version counters stay as they are, as under DDP:
    a graph of an earlier forward pass can still run backward.
    """
    for bucket in _buckets(tensors):
        flat = _bytes_of(bucket[0]) if len(bucket) == 1 else torch.cat([_bytes_of(tensor) for tensor in bucket])
        dist.broadcast(flat, group_src=0, group=group_for(flat) if group is None else group)
        if dist.get_rank(group) == 0:
            continue
        parts = torch.split(flat, [tensor.numel() * tensor.element_size() for tensor in bucket])
        for tensor, part in zip(bucket, parts, strict=True):
            _fill(tensor, part)


def _buckets(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Return `tensors` by device, a large one by itself and the others in groups of about `LARGE_BYTES`."""
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
    """Return the bytes of `tensor`: a view if it is contiguous."""
    return tensor.data.contiguous().view(-1).view(torch.uint8)


def _fill(tensor: Tensor, received: Tensor) -> None:
    if not tensor.is_contiguous():
        # A copy of the bytes, as only memory that is aligned can be seen as of a larger dtype.
        tensor.data.copy_(received.clone().view(tensor.dtype).view(tensor.shape))
    elif received.data_ptr() != tensor.data_ptr():
        _bytes_of(tensor).copy_(received)
