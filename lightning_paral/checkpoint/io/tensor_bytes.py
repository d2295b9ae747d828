"""Read the bytes of tensors in pieces: the next is copied from the GPU while the previous one is written."""

from collections.abc import Generator, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_paral.checkpoint.save_plan import WriteItem
from lightning_paral.checkpoint.shards import bytes_of, flat


class HostBytes:
    """The bytes of tensors on the host, one after the other, in one pass.

    Tensors on the host are read in place. Others are copied in pieces to two pinned buffers, on a separate stream:
    the next piece, of the same tensor or the next, is being copied while the caller uses the current one.

    Args:
        tensors: contiguous tensors. Each is requested when the bytes of the previous one have been read; if that was
            copied from a GPU, one piece earlier.
    """

    piece_bytes = 2**25
    """Size of each buffer: a power of two, to which torch rounds pinned tensors up."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._buffers: list[Tensor] = []
        self._num_copies = 0
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._pieces = self._all_pieces(tensors)
        self._rest = memoryview(b"")

    @staticmethod
    def of(entries: Iterable[WriteItem]) -> "HostBytes":
        """Return the bytes of `entries` that this rank writes, in their dtypes."""
        return HostBytes(flat(entry.part.values().to(entry.dtype)) for entry in entries if entry.part.chunks)

    def is_copied(self, tensor: Tensor) -> bool:
        """Whether `tensor` is not on the host and has to be copied to the buffers."""
        return tensor.device.type != "cpu"

    def read(self, nbytes: int) -> Iterator[memoryview]:
        """Yield the next `nbytes` bytes in views, each valid until the next is requested."""
        while nbytes:
            if not self._rest:
                self._rest = bytes_of(next(self._pieces))
            view, self._rest = self._rest[:nbytes], self._rest[nbytes:]
            nbytes -= len(view)
            yield view

    def close(self) -> None:
        """Wait for pending copies, and release tensors and buffers."""
        self._pieces.close()
        self._buffers, self._rest = [], memoryview(b"")

    def __enter__(self) -> "HostBytes":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def _all_pieces(self, tensors: Iterable[Tensor]) -> Generator[Tensor, None, None]:
        under_way: list[_Copy] = []
        try:
            for tensor in tensors:
                data = tensor.view(-1).view(torch.uint8)
                if not data.numel():
                    continue
                if not self.is_copied(data):
                    while under_way:
                        yield under_way.pop(0).finished()
                    yield data
                    continue
                for piece in torch.split(data, self.piece_bytes):
                    under_way.append(self._copy(piece))
                    if len(under_way) == 2:
                        yield under_way.pop(0).finished()
            while under_way:
                yield under_way.pop(0).finished()
        finally:
            for copy in under_way:
                copy.finished()

    def _copy(self, piece: Tensor) -> "_Copy":
        """Start to copy `piece` to the buffer of the piece before the last, which the caller no longer uses."""
        if len(self._buffers) < 2:
            self._buffers.append(torch.empty(self.piece_bytes, dtype=torch.uint8, pin_memory=piece.is_cuda))
        target = self._buffers[self._num_copies % 2][: piece.numel()]
        self._num_copies += 1
        with self._on_stream(piece.device):
            target.copy_(piece, non_blocking=True)
            event = torch.cuda.current_stream(piece.device).record_event() if piece.is_cuda else None
        return _Copy(piece, target, event)

    def _on_stream(self, device: torch.device) -> AbstractContextManager[Any]:
        if device.type != "cuda":
            return nullcontext()
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._streams[device].wait_stream(torch.cuda.current_stream(device))
        return torch.cuda.stream(self._streams[device])


@dataclass
class _Copy:
    """A pending copy. It keeps the source alive, whose memory could otherwise be reused before the copy ends."""

    source: Tensor | None
    target: Tensor
    event: Any

    def finished(self) -> Tensor:
        """Wait for the copy, and return the piece on the host."""
        if self.event is not None:
            self.event.synchronize()
        self.source = None
        return self.target
