"""Read the bytes of tensors in slices: the next slice is copied from the GPU while the previous one is written."""

from collections.abc import Generator, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_paral.checkpoint.save_plan import WriteItem
from lightning_paral.checkpoint.shards import bytes_of, flat


class HostBytes:
    """The concatenated bytes of tensors, read on the host in one pass.

    Tensors on the host are read in place. Other tensors are copied in slices to two pinned buffers on a separate
    stream: while the caller uses one slice, the next one is being copied, even if it belongs to the next tensor.

    Args:
        tensors: contiguous tensors. The next tensor is requested when all bytes of the previous one have been read; if
            the previous one is copied from a GPU, one slice earlier.
    """

    buffer_bytes = 2**25
    """Size of each buffer in bytes: a power of two, because torch rounds the size of pinned tensors up to one."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._buffers: list[Tensor] = []
        self._num_copies = 0
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._slices = self._all_slices(tensors)
        self._rest = memoryview(b"")

    @staticmethod
    def of(items: Iterable[WriteItem]) -> "HostBytes":
        """Return the bytes of the local shards of `items`, in the dtypes of the items."""
        return HostBytes(flat(item.shard.values().to(item.dtype)) for item in items if item.shard.chunks)

    def is_copied(self, tensor: Tensor) -> bool:
        """Return whether `tensor` is not on the host, and has to be copied to the buffers."""
        return tensor.device.type != "cpu"

    def read(self, nbytes: int) -> Iterator[memoryview]:
        """Yield the next `nbytes` bytes as views. Each view is valid until the next one is requested."""
        while nbytes:
            if not self._rest:
                self._rest = bytes_of(next(self._slices))
            view, self._rest = self._rest[:nbytes], self._rest[nbytes:]
            nbytes -= len(view)
            yield view

    def close(self) -> None:
        """Wait for pending copies, and release the tensors and buffers."""
        self._slices.close()
        self._buffers, self._rest = [], memoryview(b"")

    def __enter__(self) -> "HostBytes":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def _all_slices(self, tensors: Iterable[Tensor]) -> Generator[Tensor, None, None]:
        pending: list[_Copy] = []
        try:
            for tensor in tensors:
                data = tensor.view(-1).view(torch.uint8)
                if not data.numel():
                    continue
                if not self.is_copied(data):
                    while pending:
                        yield pending.pop(0).wait()
                    yield data
                    continue
                for part in torch.split(data, self.buffer_bytes):
                    pending.append(self._copy(part))
                    if len(pending) == 2:
                        yield pending.pop(0).wait()
            while pending:
                yield pending.pop(0).wait()
        finally:
            for copy in pending:
                copy.wait()

    def _copy(self, source: Tensor) -> "_Copy":
        """Start copying `source` to the less recently used buffer, whose slice the caller no longer uses."""
        if len(self._buffers) < 2:
            self._buffers.append(torch.empty(self.buffer_bytes, dtype=torch.uint8, pin_memory=source.is_cuda))
        target = self._buffers[self._num_copies % 2][: source.numel()]
        self._num_copies += 1
        with self._on_stream(source.device):
            target.copy_(source, non_blocking=True)
            event = torch.cuda.current_stream(source.device).record_event() if source.is_cuda else None
        return _Copy(source, target, event)

    def _on_stream(self, device: torch.device) -> AbstractContextManager[Any]:
        if device.type != "cuda":
            return nullcontext()
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._streams[device].wait_stream(torch.cuda.current_stream(device))
        return torch.cuda.stream(self._streams[device])


@dataclass
class _Copy:
    """A pending copy. It keeps the source alive, because its memory could otherwise be reused before the copy ends."""

    source: Tensor | None
    target: Tensor
    event: Any

    def wait(self) -> Tensor:
        """Wait until the copy has ended, and return the slice on the host."""
        if self.event is not None:
            self.event.synchronize()
        self.source = None
        return self.target
