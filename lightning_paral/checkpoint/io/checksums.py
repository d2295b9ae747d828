"""Checksums of files, by block, so that damage is found and named, and ranks can share the work of looking for it.

XXH3 of 64 bits (https://xxhash.com) of blocks of 64 MiB: as fast as memory, and made to find accidents, not fraud.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, field

from xxhash import xxh3_64, xxh3_64_intdigest

from lightning_paral.errors import CheckpointError

BLOCK_BYTES = 64 * 2**20
_STEP_BYTES = 2**20  # stays in the processor's cache between reading and summing

Block = tuple[int, int]
"""Offset and length."""

ReadInto = Callable[[int, memoryview], object]
"""Fills a buffer with the bytes of a file from an offset on."""


@dataclass(frozen=True, kw_only=True)
class FileRecord:
    """Size and checksums of one file."""

    bytes: int
    blocks: list[tuple[int, int, int]] = field(default_factory=list)
    """Offset, length and checksum of each block, in order, without gaps."""


class BlockChecksums:
    """Checksums of a file that is written from its beginning to its end."""

    def __init__(self) -> None:
        self._blocks: list[tuple[int, int, int]] = []
        self._offset = self._length = 0
        self._sum = xxh3_64()

    @property
    def position(self) -> int:
        """Number of bytes taken in."""
        return self._offset + self._length

    def update(self, data: memoryview) -> None:
        """Take in the bytes that follow."""
        while len(data):
            taken = data[: BLOCK_BYTES - self._length]
            self._sum.update(taken)
            self._length += len(taken)
            data = data[len(taken) :]
            if self._length == BLOCK_BYTES:
                self._close()

    def catch_up(self, read: ReadInto, position: int) -> None:
        """Take in the bytes of the file up to `position`, which others have written."""
        buffer = memoryview(bytearray(min(_STEP_BYTES, position - self.position)))
        while self.position < position:
            part = buffer[: position - self.position]
            read(self.position, part)
            self.update(part)

    def record(self) -> FileRecord:
        """Return size and checksums of what was taken in."""
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
    """Return the blocks of a file."""
    return [(offset, min(BLOCK_BYTES, nbytes - offset)) for offset in range(0, nbytes, BLOCK_BYTES)]


def checksum_of_block(read: ReadInto, offset: int, length: int) -> int:
    """Return the checksum of a part of a file."""
    total, buffer = xxh3_64(), memoryview(bytearray(min(_STEP_BYTES, length)))
    for start in range(offset, offset + length, _STEP_BYTES):
        part = buffer[: offset + length - start]
        read(start, part)
        total.update(part)
    return total.intdigest()


def reader_of(descriptor: int) -> ReadInto:
    """Return how an open file is read."""

    def read(offset: int, buffer: memoryview) -> None:
        while len(buffer):
            count = os.preadv(descriptor, [buffer], offset)
            if count == 0:
                raise CheckpointError(f"A file ended before byte {offset + len(buffer)}.")
            offset, buffer = offset + count, buffer[count:]

    return read


def record_bytes(data: bytes) -> FileRecord:
    """Return size and checksums of a file with this content."""
    checksums = BlockChecksums()
    checksums.update(memoryview(data))
    return checksums.record()
