"""Plain files of the size of a checkpoint, and whether files are in the page cache."""

import os
from pathlib import Path

_BLOCK_BYTES = 2**24


def write_plain(path: Path, size: int) -> None:
    """Write a file of `size` bytes, and flush it to the disk."""
    block = bytes(_BLOCK_BYTES)
    with open(path, "wb", buffering=0) as file:
        for start in range(0, size, _BLOCK_BYTES):
            file.write(block[: min(_BLOCK_BYTES, size - start)])
        os.fsync(file.fileno())


def read_plain(path: Path) -> None:
    """Read a file through a small buffer, which keeps nothing of it."""
    buffer = bytearray(_BLOCK_BYTES)
    with open(path, "rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


def size_of(path: Path) -> int:
    """Return the bytes of a file, or of all files of a folder."""
    return sum(part.stat().st_size for part in _files(path))


def drop_from_cache(path: Path) -> None:
    """Remove a file, or all files of a folder, from the page cache."""
    for part in _files(path):
        with open(part, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _files(path: Path) -> list[Path]:
    return [path] if path.is_file() else [part for part in path.rglob("*") if part.is_file()]
