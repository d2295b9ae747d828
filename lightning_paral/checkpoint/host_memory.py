"""Host memory: copies of what a save writes, and memory in huge pages for tensors that are about to be filled."""

import io
import mmap
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_paral.checkpoint.saved_tensors import SavedTensor
from lightning_paral.checkpoint.shards import LocalShard, identity

_HUGE_PAGE_BYTES = 2**21


def fresh_like(values: Tensor) -> Tensor:
    """Return an uninitialized contiguous tensor on the host with the shape and dtype of `values`.

    Large tensors are allocated in huge pages if the system supports them (Linux). In pages of the usual size, the page
    faults at the first access take three times as long as copying to the memory.
    """
    if values.nbytes < _HUGE_PAGE_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(values.shape, dtype=values.dtype)
    memory = mmap.mmap(-1, values.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=values.dtype).view(values.shape)


def host_copy(tree: Any) -> Any:
    """Return a copy of `tree` with its tensors on the host. The copies share memory if the originals do."""
    buffer = io.BytesIO()
    torch.save(tree, buffer)
    buffer.seek(0)
    return torch.load(buffer, map_location="cpu", weights_only=False)


class Staging:
    """Copies on the host of the shards that a rank writes.

    The memory is kept for the next save, because allocating it takes longer than copying to it.

    Args:
        pin: whether to use pinned memory, to which a GPU copies without waiting.
    """

    def __init__(self, *, pin: bool = False) -> None:
        self._pin = pin
        self._copies: list[Tensor] = []

    def stage(self, tensors: list[SavedTensor]) -> None:
        """Copy the shards of `tensors`, and replace them by the copies. Earlier copies are overwritten."""
        kept, self._copies = self._copies, []
        for tensor in tensors:
            if not tensor.shard.chunks:
                continue
            values = tensor.shard.values()
            copy = kept[len(self._copies)] if len(self._copies) < len(kept) else None
            if copy is None or (copy.shape, copy.dtype) != (values.shape, tensor.dtype):
                copy = self._allocate(values, tensor.dtype)
            self._copies.append(copy.copy_(values, non_blocking=self._pin))
            tensor.shard = LocalShard(tensor.shard.chunks, partial(identity, copy))
        if self._pin:
            torch.cuda.synchronize()

    def _allocate(self, values: Tensor, dtype: torch.dtype) -> Tensor:
        if self._pin:
            return torch.empty(values.shape, dtype=dtype, pin_memory=True)
        return fresh_like(torch.empty(values.shape, dtype=dtype, device="meta"))

    def release(self) -> None:
        """Free the memory."""
        self._copies.clear()
