"""Strictly read the directory of a zip archive written by `torch.save`, before anything else reads the archive.

Records must be uncompressed and must not overlap, so that no reader needs more memory than the size of the file.
Follows https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT
"""

import os
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from struct import Struct, error
from typing import Any

from lightning_paral.errors import CheckpointError

Read = Callable[[int, int], bytes]
"""Called with an offset and a size; returns that many bytes of a file, or fewer at its end."""

_END, _END_MAGIC = Struct("<4s4H2LH"), b"PK\x05\x06"
_LOCATOR, _LOCATOR_MAGIC = Struct("<4sLQL"), b"PK\x06\x07"
_END64, _END64_MAGIC = Struct("<4sQ2H2L4Q"), b"PK\x06\x06"
_ENTRY, _ENTRY_MAGIC = Struct("<4s6H3L5H2L"), b"PK\x01\x02"
_LOCAL, _LOCAL_MAGIC = Struct("<4s5H3L2H"), b"PK\x03\x04"
_EXTRA = Struct("<2H")
_MAX_COMMENT_BYTES = 2**16
_MAX_DIRECTORY_BYTES = 2**27
_UNKNOWN, _UNKNOWN_SHORT = 2**32 - 1, 2**16 - 1
_ENCRYPTED = 0x2041


@dataclass(frozen=True)
class Record:
    """A file in an archive."""

    header: int
    """Offset of its header in bytes."""
    start: int
    """Offset of its data in bytes."""
    size: int
    """Size of its data in bytes."""


@dataclass(frozen=True)
class Archive:
    """The records of a zip archive by name. They are uncompressed and do not overlap."""

    records: dict[str, Record]
    comment: bytes


def open_regular(path: str | Path) -> int:
    """Open the regular file at `path` for reading, and return its descriptor.

    Raises:
        CheckpointError: it is a FIFO, a socket or a device, which could block forever.
        OSError: it cannot be opened.
    """
    check_regular(path, os.stat(path).st_mode)
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        check_regular(path, os.fstat(descriptor).st_mode)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def check_regular(path: str | Path, mode: int) -> None:
    """Raise a `CheckpointError` if `mode`, the mode of `path`, is that of a FIFO, a socket or a device."""
    for matches, name in _SPECIAL:
        if matches(mode):
            raise CheckpointError(f"{path} is {name}, which cannot be a file of a checkpoint. Remove it.")


_SPECIAL = (
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISBLK, "a block device"),
    (stat.S_ISCHR, "a device"),
)


def read_archive(read: Read, nbytes: int, name: object) -> Archive | None:
    """Return the directory of a zip archive; `None` if the file is not a zip archive.

    Args:
        read: reads bytes of the file.
        nbytes: the size of the file.
        name: the name of the file, for error messages.

    Raises:
        CheckpointError: the archive is damaged, compressed, or has a different layout than those of `torch.save`.
    """
    try:
        return _read(read, nbytes)
    except (error, ValueError) as fault:
        raise CheckpointError(f"{name} is damaged, truncated or not a checkpoint: {fault}.") from fault


def _read(read: Read, nbytes: int) -> Archive | None:
    if read(0, 4) != _LOCAL_MAGIC:
        return None
    start = max(0, nbytes - _END.size - _MAX_COMMENT_BYTES)
    tail = read(start, nbytes - start)
    at = tail.rfind(_END_MAGIC)
    if at < 0:
        raise ValueError("its zip archive has no end")
    _, *disks, count, size, offset, num_comment = _END.unpack_from(tail, at)
    comment = tail[at + _END.size :]
    end = start + at
    if len(comment) != num_comment or disks[:2] != [0, 0] or disks[2] != count:
        raise ValueError("the end of its zip archive is broken")
    located = read(max(0, end - _LOCATOR.size), _LOCATOR.size)
    if located[:4] == _LOCATOR_MAGIC:
        end -= _LOCATOR.size + _END64.size
        _, _, end64, _ = _LOCATOR.unpack(located)
        magic, _, _, _, _, _, *large = _END64.unpack(read(max(0, end), _END64.size))
        if end64 != end or magic != _END64_MAGIC:
            raise ValueError("the end of its zip archive is broken")
        _, count, size, offset = large
    if offset + size != end or size > _MAX_DIRECTORY_BYTES or count * _ENTRY.size > size:
        raise ValueError("the directory of its zip archive is not where it should be")
    return Archive(_records(read, read(offset, size), count, offset), comment)


def _records(read: Read, directory: bytes, count: int, end: int) -> dict[str, Record]:
    found: dict[str, Record] = {}
    seen: set[str] = set()
    at = 0
    for _ in range(count):
        magic, _, _, flags, method, _, _, _, packed, size, *more = _ENTRY.unpack_from(directory, at)
        num_name, num_extra, num_comment, _, _, _, header = more
        at += _ENTRY.size
        if magic != _ENTRY_MAGIC or at + num_name + num_extra + num_comment > len(directory):
            raise ValueError("the directory of its zip archive is broken")
        name = directory[at : at + num_name].decode()
        extra = directory[at + num_name : at + num_name + num_extra]
        at += num_name + num_extra + num_comment
        size, packed, header = _large(extra, size, packed, header)
        if method != 0 or flags & _ENCRYPTED or packed != size:
            raise ValueError(f"its record {name} is compressed or encrypted, but torch.save does neither")
        if name.lower() in seen:  # torch ignores the case of names
            raise ValueError(f"its record {name} occurs twice")
        seen.add(name.lower())
        found[name] = _record(read, name, header, size)
    if at != len(directory):
        raise ValueError("the directory of its zip archive is broken")
    position = 0
    for name, record in sorted(found.items(), key=lambda item: item[1].header):
        if record.header < position:
            raise ValueError(f"its record {name} overlaps another record")
        position = record.start + record.size
    if position > end:
        raise ValueError("its records overlap its directory")
    return found


def _record(read: Read, name: str, header: int, size: int) -> Record:
    local: Any = read(header, _LOCAL.size)
    magic, _, flags, method, _, _, _, _, _, num_name, num_extra = _LOCAL.unpack(local)
    if magic != _LOCAL_MAGIC or method != 0 or flags & _ENCRYPTED:
        raise ValueError(f"its record {name} does not begin at the offset in the directory")
    if read(header + _LOCAL.size, num_name) != name.encode():
        raise ValueError(f"its record {name} has another name in its own header")
    return Record(header, header + _LOCAL.size + num_name + num_extra, size)


def _large(extra: bytes, size: int, packed: int, header: int) -> tuple[int, int, int]:
    """Return the sizes and the offset, taken from the Zip64 field if they do not fit into 32 bits."""
    at = 0
    while at + _EXTRA.size <= len(extra):
        field_id, length = _EXTRA.unpack_from(extra, at)
        if field_id == 1:
            values = iter(Struct(f"<{length // 8}Q").unpack_from(extra, at + _EXTRA.size))
            size, packed, header = (next(values, v) if v == _UNKNOWN else v for v in (size, packed, header))
            break
        at += _EXTRA.size + length
    return size, packed, header
