"""The manifest of a checkpoint: what it is, and size and checksums of every file, so that damage is found and named.

A folder holds it as `manifest.json`, a single file as a record inside its zip archive, which other readers ignore.
Checksums are CRC-32 of blocks of 64 MiB, so that ranks can share the work of verifying; they find accidents, not fraud.
"""

import json
import os
import re
import zipfile
import zlib
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lightning_paral.errors import CheckpointError

FORMAT = 1
FILE_NAME = "manifest.json"
BLOCK_BYTES = 64 * 2**20
_RECORD = "lightning_paral.json"
_COMMENT = re.compile(rb"lightning_paral ([0-9a-f]{16}) ([0-9a-f]{8})")
_CRC_DIGITS = 8


@dataclass(frozen=True, kw_only=True)
class FileRecord:
    """Size and checksums of one file."""

    bytes: int
    blocks: list[tuple[int, int, int]] = field(default_factory=list)
    """Offset, length and CRC-32 of each block, in order, without gaps."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a checkpoint says of itself."""

    form: str
    strategy: str
    world_size: int
    epoch: int
    global_step: int
    files: dict[str, FileRecord]
    """By name relative to the folder; a full checkpoint has one, named as itself, up to where the manifest begins."""
    names: dict[str, str] = field(default_factory=dict)
    """Where another name than the usual one holds a file: behind a URL, files of a new save must not replace the old's
    before the manifest does."""
    format: int = FORMAT

    def to_json(self) -> str:
        """Return the manifest as JSON that carries its own checksum."""
        content = asdict(self)
        return _text(content | {"checksum": _checksum(content)})

    @staticmethod
    def from_json(text: str, name: str) -> "Manifest":
        """Read what `to_json` wrote.

        Raises:
            CheckpointError: it was changed since, or is of a format this release does not know; names `name`.
        """
        try:
            content = json.loads(text)
            checksum = content.pop("checksum")
            intact = checksum == _checksum(content) and text == _text(content | {"checksum": checksum})
        except (ValueError, KeyError, TypeError, AttributeError):
            intact = False
        if not intact:
            raise CheckpointError(f"{name} is damaged: it is not what was written.")
        if content["format"] > FORMAT:
            raise CheckpointError(
                f"{name} is of format {content['format']}, this release reads up to {FORMAT}: upgrade lightning_paral."
            )
        files = {
            file: FileRecord(bytes=record["bytes"], blocks=[tuple(block) for block in record["blocks"]])
            for file, record in content.pop("files").items()
        }
        return Manifest(**content, files=files)


def _text(content: dict[str, Any]) -> str:
    return json.dumps(content, sort_keys=True, separators=(",", ":")) + "\n"


def _checksum(content: dict[str, Any]) -> str:
    return f"{zlib.crc32(_text(content).encode()):08x}"


class BlockChecksums:
    """Checksums of a file that is written from its beginning to its end."""

    def __init__(self) -> None:
        self._blocks: list[tuple[int, int, int]] = []
        self._offset = self._length = self._crc = 0

    def update(self, data: memoryview) -> None:
        """Take in the bytes that follow."""
        while len(data):
            taken = data[: BLOCK_BYTES - self._length]
            self._crc = zlib.crc32(taken, self._crc)
            self._length += len(taken)
            data = data[len(taken) :]
            if self._length == BLOCK_BYTES:
                self._close()

    def record(self) -> FileRecord:
        """Return size and checksums of what was taken in."""
        if self._length:
            self._close()
        return FileRecord(bytes=self._offset, blocks=self._blocks)

    def _close(self) -> None:
        self._blocks.append((self._offset, self._length, self._crc))
        self._offset += self._length
        self._length = self._crc = 0


def blocks_of(nbytes: int) -> list[tuple[int, int]]:
    """Return offset and length of each block of a file."""
    return [(offset, min(BLOCK_BYTES, nbytes - offset)) for offset in range(0, nbytes, BLOCK_BYTES)]


ReadInto = Callable[[int, memoryview], object]
"""Fills a buffer with the bytes of a file from an offset on."""

_STEP_BYTES = 2**20  # stays in the processor's cache between reading and summing


def crc_of(read: ReadInto, offset: int, length: int) -> int:
    """Return the CRC-32 of a part of a file."""
    crc, buffer = 0, memoryview(bytearray(min(_STEP_BYTES, length)))
    for start in range(offset, offset + length, _STEP_BYTES):
        part = buffer[: offset + length - start]
        read(start, part)
        crc = zlib.crc32(part, crc)
    return crc


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


# In a single file


def embed(path: str | Path, make: Callable[[int], Manifest]) -> None:
    """Add a manifest to the zip archive at `path`, of which `make(nbytes)` knows the first `nbytes` bytes.

    The archive's comment, at the very end, says where the manifest begins, and the checksum of all from there on.
    """
    with zipfile.ZipFile(path, "a") as archive:
        start = archive.start_dir
        top = archive.namelist()[0].split("/")[0]
        archive.writestr(f"{top}/{_RECORD}", make(start).to_json())
        archive.comment = b"lightning_paral %016x %08x" % (start, 0)
    with open(path, "r+b") as file:
        file.seek(start)
        tail = file.read()[:-_CRC_DIGITS]
        file.seek(start + len(tail))
        file.write(b"%08x" % zlib.crc32(tail))
        file.flush()
        os.fsync(file.fileno())


def extract(path: str | Path) -> Manifest | None:
    """Return the manifest inside a single file; `None` if it has none, as files of other tools.

    Raises:
        CheckpointError: the file is truncated or damaged.
    """
    name = str(path)
    try:
        with zipfile.ZipFile(path) as archive:
            records = [record for record in archive.namelist() if record.endswith("/" + _RECORD)]
            comment = archive.comment
            if not records and not comment.startswith(b"lightning_paral"):
                return None
            found = _COMMENT.fullmatch(comment)
            if len(records) != 1 or found is None:
                raise CheckpointError(f"{name} is damaged: its manifest is broken.")
            text = archive.read(records[0]).decode()
    except (
        zipfile.BadZipFile,
        UnicodeDecodeError,
        NotImplementedError,
        zlib.error,
        EOFError,
        ValueError,
        OSError,
    ) as error:
        raise CheckpointError(f"{name} is damaged or truncated, or no checkpoint: {error}.") from error
    start, crc = int(found.group(1), 16), int(found.group(2), 16)
    with open(path, "rb") as file:
        file.seek(start)
        if zlib.crc32(file.read()[:-_CRC_DIGITS]) != crc:
            raise CheckpointError(f"{name} is damaged: bytes from {start} on are not what was written.")
    return Manifest.from_json(text, name)


def damaged_blocks(record: FileRecord, size: int | None, name: str, read: ReadInto, blocks: Iterable[int]) -> list[str]:
    """Return what is wrong with the given blocks of a file of `size` bytes, `None` if it is missing."""
    if size is None:
        return [f"{name} is missing"]
    if size != record.bytes:
        return [f"{name} has {size} bytes instead of {record.bytes}"]
    faults = []
    for number in blocks:
        offset, length, crc = record.blocks[number]
        if crc_of(read, offset, length) != crc:
            faults.append(f"{name} is damaged between bytes {offset} and {offset + length}")
    return faults
