"""One allocation on the host that consecutive saves share, cut into tensors."""

import weakref
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lightning_paral.checkpoint.memory import fresh_bytes

ALIGNMENT = 64
"""Tensors begin at multiples of so many bytes: that of a cache line, and of every dtype."""
_FOR_ALL_DEVICES = 1  # cudaHostRegisterPortable


def aligned(nbytes: int) -> int:
    """Return the bytes that a tensor of `nbytes` takes of an arena."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class Arena:
    """Memory that is asked for once and used again and again.

    torch rounds each pinned tensor up to a power of two; this is as large as asked for, and lies in huge pages where
    the system has them.

    Args:
        pin: let CUDA copy to it without going through a buffer of its own, and without the processor. Where the system
            does not allow that, a warning says so, and copies are slower.
    """

    def __init__(self, *, pin: bool) -> None:
        self._pin = pin
        self._memory: _Memory | None = None
        self._position = 0

    @property
    def nbytes(self) -> int:
        """Bytes that it holds of the host's memory."""
        return 0 if self._memory is None else self._memory.bytes.nbytes

    def reserve(self, nbytes: int) -> None:
        """Have room for `nbytes` in all. What was taken before will be overwritten."""
        self._position = 0
        if nbytes > self.nbytes:
            self.release()  # first, so that the old and the new are not there at once
            self._memory = _Memory(nbytes, self._pin)
            self._pin = self._memory.is_pinned

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return uninitialized memory of shape `[numel]`, which no other tensor taken since `reserve` shares."""
        nbytes = numel * dtype.itemsize
        start, self._position = self._position, self._position + aligned(nbytes)
        assert self._memory is not None
        assert self._position <= self.nbytes, "more was taken than reserved"
        return self._memory.bytes[start : start + nbytes].view(dtype)

    def release(self) -> None:
        """Give the memory back, as soon as no tensor lies in it any more."""
        if self._memory is not None:
            self._memory.unpin()
        self._memory = None


class _Memory:
    """Bytes on the host, unpinned before they go."""

    def __init__(self, nbytes: int, pin: bool) -> None:
        self.bytes = fresh_bytes(nbytes)
        self.is_pinned = pin and _pin(self.bytes)
        # The finalizer holds the memory: unmapped first, its pages would stay locked.
        self._finalizer = weakref.finalize(self, _unpin, self.bytes) if self.is_pinned else None
        if self._finalizer is not None:
            self._finalizer.atexit = False  # CUDA may be gone by then

    def unpin(self) -> None:
        if self._finalizer is not None:
            self._finalizer()


def _pin(memory: Tensor) -> bool:
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    code = int(runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, _FOR_ALL_DEVICES))
    if code == 0:
        return True
    _forget_error()
    rank_zero_warn(
        f"{memory.nbytes / 1e9:,.1f} GB of the host's memory could not be pinned for saving in the background (CUDA "
        f"error {code}): copies to them take longer. Let the container or the job lock more memory, or say "
        "async_save=False."
    )
    return False


def _unpin(memory: Tensor) -> None:
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    if int(runtime.cudaHostUnregister(memory.data_ptr())) != 0:
        _forget_error()


def _forget_error() -> None:
    # CUDA keeps an error until somebody asks. torch asks after each kernel, and would take it for the kernel's.
    try:
        torch.zeros(1, device="cuda")
    except RuntimeError:
        return
