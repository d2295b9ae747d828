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


def fresh_bytes(nbytes: int) -> Tensor:
    """Return `nbytes` of uninitialized memory, at least one, in its own pages: huge ones if possible."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(nbytes, dtype=torch.uint8)
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)
