"""Allocate host memory that is about to be filled."""

import mmap
from contextlib import suppress

import torch
from torch import Tensor

_HUGE_PAGE_BYTES = 2**21


def fresh_like(values: Tensor) -> Tensor:
    """Return uninitialized memory on the host with shape and dtype of `values`, contiguous.

    Large tensors lie in huge pages where the system has them (Linux): memory that is touched for the first time costs
    more by the page than by the byte, three times as much as copying to it.
    """
    if values.nbytes < _HUGE_PAGE_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(values.shape, dtype=values.dtype)
    return fresh_bytes(values.nbytes).view(values.dtype).view(values.shape)


def fresh_bytes(nbytes: int, *, in_children: bool = True) -> Tensor:
    """Return `nbytes` of uninitialized memory, at least one, in its own pages: huge ones if possible.

    Args:
        nbytes: how many.
        in_children: whether processes that are forked later have the memory, too. Say no for what will be pinned.
    """
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(nbytes, dtype=torch.uint8)
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    if not in_children and hasattr(mmap, "MADV_DONTFORK"):
        # Before Linux 5.12, what is written to a page after a fork goes to a copy of it, also in the parent, while a
        # device goes on writing to the pinned original: workers of a data loader would change what is saved.
        with suppress(OSError):
            memory.madvise(mmap.MADV_DONTFORK)
    return torch.frombuffer(memory, dtype=torch.uint8)
