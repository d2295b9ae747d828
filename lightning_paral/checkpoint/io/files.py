"""Files: written sequentially with a checksum of each block, and flushed to the disk in the background.

Checksums are XXH3 of 64 bits (https://xxhash.com) of blocks of 64 MiB, so that ranks can divide the work of verifying a
file. They detect accidental damage, not fraud.
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
"""Called with an offset and a buffer; fills the buffer with the bytes of a file from there."""


@dataclass(frozen=True, kw_only=True)
class FileRecord:
    """Size and checksums of one file."""

    bytes: int
    blocks: list[tuple[int, int, int]] = field(default_factory=list)
    """Offset, length and checksum of each block, in order, without gaps."""


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

    def catch_up(self, read: ReadInto, position: int) -> None:
        """Read and process the bytes of the file up to `position`, which were written in another way."""
        buffer = memoryview(bytearray(min(_STEP_BYTES, position - self.position)))
        while self.position < position:
            part = buffer[: position - self.position]
            read(self.position, part)
            self.update(part)

    def record(self) -> FileRecord:
        """Return size and checksums of the bytes processed."""
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


def blocks_of(nbytes: int) -> list[Block]:
    """Return offset and length of each block of a file of `nbytes` bytes."""
    return [(offset, min(BLOCK_BYTES, nbytes - offset)) for offset in range(0, nbytes, BLOCK_BYTES)]


def checksum_of_block(read: ReadInto, offset: int, length: int) -> int:
    """Return the checksum of `length` bytes of a file from `offset` on."""
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
    """Return size and checksums of a file with the content `data`."""
    checksums = BlockChecksums()
    checksums.update(memoryview(data))
    return checksums.record()


class BackgroundFsync:
    """Calls `fsync` in the background while a file is being written, so that the last call has little to wait for.

    By default Linux starts writing to the disk once a tenth of the memory is dirty, and the disk is idle until then.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="flush")
        self._pending: Future[None] | None = None
        self._unflushed_bytes = 0

    def wrote(self, nbytes: int) -> None:
        """Note that the file has grown by `nbytes`, and start to flush it if enough is unwritten.

        Raises:
            OSError: an earlier flush failed. The kernel reports such a failure only once, so it is raised here.
        """
        self._unflushed_bytes += nbytes
        if self._unflushed_bytes >= _FLUSH_BYTES and (self._pending is None or self._pending.done()):
            self._check()
            self._pending = self._thread.submit(_flush_data, self._descriptor)
            self._unflushed_bytes = 0

    def finish(self) -> None:
        """Flush the file, and wait for it.

        Raises:
            OSError: this or an earlier flush failed.
        """
        self._check()
        os.fsync(self._descriptor)

    def _check(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def __enter__(self) -> "BackgroundFsync":
        return self

    def __exit__(self, *_: Any) -> None:
        self._thread.shutdown()


class ChecksummedWriter:
    """A new file that is written sequentially, and flushed to the disk when it is closed without an error.

    Args:
        file: open for writing, at its beginning.
        on_disk: whether it is a local file. Uploads are durable once they are closed.
    """

    def __init__(self, file: BinaryIO, *, on_disk: bool) -> None:
        self._file = file
        self._fsync = BackgroundFsync(file.fileno()) if on_disk else None
        self._checksums = BlockChecksums()
        self.error: OSError | None = None
        """The error of the last write, in place of which `torch.save` raises one of its own."""

    @property
    def position(self) -> int:
        """Number of bytes written."""
        return self._checksums.position

    def write(self, data: Any) -> int:
        """Append bytes."""
        view = memoryview(data).cast("B")
        try:
            self._file.write(view)
            if self._fsync is not None:
                self._fsync.wrote(len(view))
        except OSError as error:
            self.error = error
            raise
        self._checksums.update(view)
        return len(view)

    def pad(self, alignment: int) -> None:
        """Append zeros until the position is a multiple of `alignment`."""
        self.write(bytes(-self.position % alignment))

    def flush(self) -> None:
        """Do nothing: closing the file flushes it."""

    def record(self) -> FileRecord:
        """Return size and checksums of what was written."""
        return self._checksums.record()

    def __enter__(self) -> "ChecksummedWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._file, self._fsync or nullcontext():
            if error is None:
                self._file.flush()
                if self._fsync is not None:
                    self._fsync.finish()
            elif self.error is not None:
                raise self.error
