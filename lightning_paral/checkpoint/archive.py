"""Strictly read the directory of a zip archive written by `torch.save`, before anything else reads the archive.

Records must be uncompressed and must not overlap, so that no reader needs more memory than the size of the file.
Follows https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT
"""

import os
import stat
from collections.abc import Callable, Iterator
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
_UNKNOWN = 2**32 - 1


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
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise CheckpointError(f"{path} is a FIFO, a socket or a device, not a file of a checkpoint. Remove it.")


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
    _require(at >= 0, "its zip archive has no end")
    _, disk, first_disk, num_entries, count, size, offset, num_comment = _END.unpack_from(tail, at)
    comment = tail[at + _END.size :]
    _require(
        (len(comment), disk, first_disk, num_entries) == (num_comment, 0, 0, count),
        "the end of its zip archive is broken",
    )
    end = start + at
    located = read(max(0, end - _LOCATOR.size), _LOCATOR.size)
    if located[:4] == _LOCATOR_MAGIC:
        end -= _LOCATOR.size + _END64.size
        _, _, end64, _ = _LOCATOR.unpack(located)
        magic, *_, count, size, offset = _END64.unpack(read(max(0, end), _END64.size))
        _require(end64 == end and magic == _END64_MAGIC, "the end of its zip archive is broken")
    fits = offset + size == end and size <= _MAX_DIRECTORY_BYTES and count * _ENTRY.size <= size
    _require(fits, "the directory of its zip archive is not where it should be")
    records = _records(read, read(offset, size), count)
    position = 0
    for name, record in sorted(records.items(), key=lambda item: item[1].header):
        _require(record.header >= position, f"its record {name} overlaps another one")
        position = record.start + record.size
    _require(position <= offset, "its records overlap its directory")
    return Archive(records, comment)


def _records(read: Read, directory: bytes, count: int) -> dict[str, Record]:
    found: dict[str, Record] = {}
    seen: set[str] = set()
    at = 0
    for _ in range(count):
        magic, _, _, _, method, *_, packed, size, num_name, num_extra, num_comment, _, _, _, header = (
            _ENTRY.unpack_from(directory, at)
        )
        at += _ENTRY.size
        name = directory[at : at + num_name].decode()
        extra = directory[at + num_name : at + num_name + num_extra]
        at += num_name + num_extra + num_comment
        _require(magic == _ENTRY_MAGIC and at <= len(directory), "the directory of its zip archive is broken")
        size, packed, header = _large(extra, size, packed, header)
        plain = method == 0 and packed == size
        _require(plain, f"its record {name} is compressed or encrypted, but torch.save does neither")
        _require(name.lower() not in seen, f"its record {name} occurs twice")  # torch ignores the case of names
        seen.add(name.lower())
        local: Any = _LOCAL.unpack(read(header, _LOCAL.size))
        same = local[0] == _LOCAL_MAGIC and local[3] == 0 and read(header + _LOCAL.size, local[-2]) == name.encode()
        _require(same, f"its record {name} has another header than in the directory")
        found[name] = Record(header, header + _LOCAL.size + local[-2] + local[-1], size)
    _require(at == len(directory), "the directory of its zip archive is broken")
    return found


def _large(extra: bytes, *numbers: int) -> Iterator[int]:
    """Yield sizes and an offset, taken from the Zip64 field if they do not fit into 32 bits."""
    at, large = 0, iter(())
    while at + _EXTRA.size <= len(extra):
        field_id, length = _EXTRA.unpack_from(extra, at)
        if field_id == 1:
            large = iter(Struct(f"<{length // 8}Q").unpack_from(extra, at + _EXTRA.size))
            break
        at += _EXTRA.size + length
    for number in numbers:
        yield next(large, number) if number == _UNKNOWN else number


def _require(fits: bool, fault: str) -> None:
    if not fits:
        raise ValueError(fault)
