"""Host memory: huge pages for tensors that are about to be filled, and a reusable allocation for async saves."""

import mmap
import weakref
from contextlib import suppress
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

ALIGNMENT = 64
"""Alignment of tensors in an arena in bytes: the size of a cache line."""
_FOR_ALL_DEVICES = 1  # cudaHostRegisterPortable
_HUGE_PAGE_BYTES = 2**21


def fresh_like(values: Tensor) -> Tensor:
    """Return an uninitialized contiguous tensor on the host with the shape and dtype of `values`.

    Large tensors are allocated in huge pages if the system supports them (Linux). In pages of the usual size, the page
    faults at the first access take three times as long as copying to the memory.
    """
    if values.nbytes < _HUGE_PAGE_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(values.shape, dtype=values.dtype)
    return fresh_bytes(values.nbytes).view(values.dtype).view(values.shape)


def fresh_bytes(nbytes: int, *, in_children: bool = True) -> Tensor:
    """Return an uninitialized 1-dimensional `uint8` tensor on the host in pages of its own, huge ones if possible.

    Args:
        nbytes: the number of elements, at least 1.
        in_children: whether processes that are forked later inherit the memory. `False` is for memory to pin later.
    """
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(nbytes, dtype=torch.uint8)
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    if not in_children and hasattr(mmap, "MADV_DONTFORK"):
        # Before Linux 5.12, a write to a page after a fork goes to a copy of the page, even in the parent, while the
        # device keeps writing to the pinned original. A DataLoader with workers would corrupt the checkpoint.
        with suppress(OSError):
            memory.madvise(mmap.MADV_DONTFORK)
    return torch.frombuffer(memory, dtype=torch.uint8)


def aligned(nbytes: int) -> int:
    """Return `nbytes` rounded up to a multiple of `ALIGNMENT`."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class Arena:
    """Host memory that is allocated once and reused.

    torch rounds the size of each pinned tensor up to a power of two. An arena has exactly the requested size, in huge
    pages if the system supports them.

    Args:
        pin: whether to page-lock the memory, so that CUDA copies to it directly and asynchronously. If the system does
            not allow it, warn and use unpinned memory, to which copies are slower.
    """

    def __init__(self, *, pin: bool) -> None:
        self._pin = pin
        self._memory: _Memory | None = None
        self._position = 0

    @property
    def nbytes(self) -> int:
        """Size of the allocation in bytes; 0 if there is none."""
        return 0 if self._memory is None else self._memory.bytes.nbytes

    def reserve(self, nbytes: int) -> None:
        """Ensure that at least `nbytes` are allocated. Later tensors overwrite those that were taken before."""
        self._position = 0
        if nbytes > self.nbytes:
            self.release()  # first, so that the old and the new memory never exist at the same time
            self._memory = _Memory(nbytes, self._pin)
            self._pin = self._memory.is_pinned

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return an uninitialized tensor of shape `[numel]`. Tensors taken since the last `reserve` do not overlap."""
        nbytes = numel * dtype.itemsize
        start, self._position = self._position, self._position + aligned(nbytes)
        assert self._memory is not None
        assert self._position <= self.nbytes, "more was taken than reserved"
        return self._memory.bytes[start : start + nbytes].view(dtype)

    def release(self) -> None:
        """Unpin the memory. It is freed when no tensor uses it."""
        if self._memory is not None:
            self._memory.unpin()
        self._memory = None


class _Memory:
    """Host memory that is unpinned before it is freed."""

    def __init__(self, nbytes: int, pin: bool) -> None:
        self.bytes = fresh_bytes(nbytes, in_children=not pin)
        self.is_pinned = pin and _pin(self.bytes)
        # The finalizer keeps the memory alive, because pages that are unmapped before they are unpinned stay locked.
        self._finalizer = weakref.finalize(self, _unpin, self.bytes) if self.is_pinned else None
        if self._finalizer is not None:
            self._finalizer.atexit = False  # at exit, CUDA may already be shut down

    def unpin(self) -> None:
        if self._finalizer is not None:
            self._finalizer()


def _pin(memory: Tensor) -> bool:
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    code = int(runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, _FOR_ALL_DEVICES))
    if code == 0:
        return True
    _clear_cuda_error()
    rank_zero_warn(
        f"{memory.nbytes / 1e9:,.1f} GB of host memory could not be pinned for asynchronous saves (CUDA error {code}), "
        "so copies to it are slower. Raise the container's or job's limit on locked memory, or set async_save=False."
    )
    return False


def _unpin(memory: Tensor) -> None:
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    if int(runtime.cudaHostUnregister(memory.data_ptr())) != 0:
        _clear_cuda_error()


def _clear_cuda_error() -> None:
    # CUDA keeps an error until it is read. torch reads it after the next kernel, and would attribute it to that kernel.
    try:
        torch.zeros(1, device="cuda")
    except RuntimeError:
        return
