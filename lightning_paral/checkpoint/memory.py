"""Memory of the host: fresh, where it is about to be filled, and kept, where one save follows the other."""

import mmap
from contextlib import suppress
from functools import partial

import torch
from torch import Tensor

from lightning_paral.checkpoint.held import Part, same
from lightning_paral.checkpoint.plan import Entry, Path

_HUGE_PAGE_BYTES = 2**21


def fresh_like(values: Tensor) -> Tensor:
    """Return uninitialized memory on the host with shape and dtype of `values`, contiguous.

    Large tensors lie in huge pages where the system has them (Linux): memory that is touched for the first time costs
    more by the page than by the byte, three times as much as copying to it.
    """
    if values.nbytes < _HUGE_PAGE_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(values.shape, dtype=values.dtype)
    memory = mmap.mmap(-1, values.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=values.dtype).view(values.shape)


class Staging:
    """Copies of what a rank writes, so that training can change the originals before it is written.

    The memory stays for the next save: to get it anew would take longer than to copy to it. It is pinned where the
    originals are on CUDA.
    """

    def __init__(self) -> None:
        self._memory: dict[Path, Tensor] = {}

    def stage(self, entries: list[Entry]) -> None:
        """Have the parts of `entries` return copies, made now. The copies staged before are overwritten."""
        streams = set()
        for entry in entries:
            if entry.part.boxes:
                values = entry.part.values()
                copy = self._memory_for(entry.path, values).copy_(values, non_blocking=True)
                entry.part = Part(entry.part.boxes, partial(same, copy))
                if values.is_cuda:
                    streams.add(torch.cuda.current_stream(values.device))
        for stream in streams:
            stream.synchronize()

    def _memory_for(self, path: Path, values: Tensor) -> Tensor:
        kept = self._memory.get(path)
        if kept is None or kept.shape != values.shape or kept.dtype != values.dtype:
            pinned = values.is_cuda
            kept = torch.empty(values.shape, dtype=values.dtype, pin_memory=True) if pinned else fresh_like(values)
            self._memory[path] = kept
        return kept
