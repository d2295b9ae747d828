"""Files that are written sequentially, with a checksum of each block, and are flushed to disk in the background.

Each block of 64 MiB has its own 64-bit XXH3 checksum (https://xxhash.com), so that several ranks can verify one file.
The checksums detect accidental damage, but not manipulation.
"""

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, BinaryIO

from xxhash import xxh3_64, xxh3_64_intdigest

from lightning_paral.errors import CheckpointError

BLOCK_BYTES = 64 * 2**20
_STEP_BYTES = 2**20  # small enough to stay in the CPU cache between reading and hashing
_FLUSH_BYTES = 128 * 2**20
_flush_data = getattr(os, "fdatasync", os.fsync)  # macOS has fsync only

Block = tuple[int, int]
"""Offset and length."""

ReadInto = Callable[[int, memoryview], object]
"""Called with an offset and a buffer; fills the buffer with the bytes of a file that begin at the offset."""


@dataclass(frozen=True, kw_only=True)
class FileRecord:
    """The size and checksums of a file."""

    bytes: int
    """The size in bytes."""
    blocks: list[tuple[int, int, int]] = field(default_factory=list)
    """Offset, length and checksum of each block, in order and without gaps."""


class BlockChecksums:
    """Computes the checksums of a file that is written sequentially."""

    def __init__(self) -> None:
        self._blocks: list[tuple[int, int, int]] = []
        self._offset = self._length = 0
        self._sum = xxh3_64()

    @property
    def position(self) -> int:
        """Number of bytes processed."""
        return self._offset + self._length

    def update(self, data: memoryview) -> None:
        """Process the next bytes of the file."""
        while len(data):
            taken = data[: BLOCK_BYTES - self._length]
            self._sum.update(taken)
            self._length += len(taken)
            data = data[len(taken) :]
            if self._length == BLOCK_BYTES:
                self._close()

    def record(self) -> FileRecord:
        """Return the size and checksums of the bytes processed so far. Call this once, at the end of the file."""
        if self._length:
            self._close()
        return FileRecord(bytes=self._offset, blocks=self._blocks)

    def _close(self) -> None:
        self._blocks.append((self._offset, self._length, self._sum.intdigest()))
        self._offset += self._length
        self._length = 0
        self._sum.reset()


def checksum(data: bytes | memoryview) -> int:
    """Return the checksum of `data`."""
    return xxh3_64_intdigest(data)


def checksum_of_block(read: ReadInto, offset: int, length: int) -> int:
    """Return the checksum of the `length` bytes of a file that begin at `offset`."""
    total, buffer = xxh3_64(), memoryview(bytearray(min(_STEP_BYTES, length)))
    for start in range(offset, offset + length, _STEP_BYTES):
        part = buffer[: offset + length - start]
        read(start, part)
        total.update(part)
    return total.intdigest()


def reader_of(descriptor: int) -> ReadInto:
    """Return a function that reads from an open file.

    It raises a `CheckpointError` if the file ends before the buffer is full.
    """

    def read(offset: int, buffer: memoryview) -> None:
        while len(buffer):
            count = os.preadv(descriptor, [buffer], offset)
            if count == 0:
                raise CheckpointError(f"A file ended before byte {offset + len(buffer)}.")
            offset, buffer = offset + count, buffer[count:]

    return read


def record_bytes(data: bytes) -> FileRecord:
    """Return the size and checksums of a file with the content `data`."""
    checksums = BlockChecksums()
    checksums.update(memoryview(data))
    return checksums.record()


class ChecksummedWriter:
    """A new file that is written sequentially, and is on disk when it is closed without an error.

    It is flushed in the background while it is written, so that the last flush takes little time. By default, Linux
    starts writing to disk only when a tenth of the memory is dirty. Until then the disk would idle.

    Args:
        file: a file open for writing, at its beginning.
        on_disk: whether it is a file of the operating system, which has to be flushed. Uploads are durable once they
            are closed.
    """

    def __init__(self, file: BinaryIO, *, on_disk: bool) -> None:
        self._file = file
        self._flusher = ThreadPoolExecutor(max_workers=1, thread_name_prefix="flush") if on_disk else None
        self._flush: Future[None] | None = None
        self._unflushed_bytes = 0
        self._checksums = BlockChecksums()
        self.error: BaseException | None = None
        """The error of the last write. It is kept because `torch.save` replaces it by another error."""

    @property
    def position(self) -> int:
        """Number of bytes written."""
        return self._checksums.position

    def write(self, data: Any) -> int:
        """Append bytes."""
        view = memoryview(data).cast("B")
        try:
            self._file.write(view)
            self._unflushed_bytes += len(view)
            if self._flusher and self._unflushed_bytes >= _FLUSH_BYTES and (not self._flush or self._flush.done()):
                self._check_flush()
                self._flush = self._flusher.submit(_flush_data, self._file.fileno())
                self._unflushed_bytes = 0
        except BaseException as error:
            self.error = error
            raise
        self._checksums.update(view)
        return len(view)

    def _check_flush(self) -> None:
        """Raise the error of the last flush. The kernel reports such a failure only once, so `fsync` would not."""
        flush, self._flush = self._flush, None
        if flush is not None:
            flush.result()

    def pad(self, alignment: int) -> None:
        """Append zeros until the position is a multiple of `alignment`."""
        self.write(bytes(-self.position % alignment))

    def flush(self) -> None:
        """Do nothing: closing the file flushes it."""

    def record(self) -> FileRecord:
        """Return the size and checksums of the bytes written. Call this once, at the end of the file."""
        return self._checksums.record()

    def __enter__(self) -> "ChecksummedWriter":
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._file, self._flusher or nullcontext():
            if error is None:
                self._file.flush()
                if self._flusher is not None:
                    self._check_flush()
                    os.fsync(self._file.fileno())
            elif self.error is not None:
                raise self.error
