"""Folders of checkpoint files: on a local or shared file system, or accessed by fsspec (`s3://`, `memory://`)."""

import mmap
import os
import re
import stat
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from lightning_paral.checkpoint.archive import check_regular, open_regular
from lightning_paral.checkpoint.commit import check_replaceable_at, inspect, remove, remove_beside_others
from lightning_paral.checkpoint.manifest import Block, ChecksummedWriter, checksum, checksum_of_block
from lightning_paral.errors import CheckpointError

COPY_NAME = re.compile(r"\S+/lightning_paral_\w+\.copy")
"""Matches the paths of local copies of files at URLs, see `get_file`."""

_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs", "abfs": "azure", "abfss": "azure", "az": "azure"}
_AHEAD_BYTES = 2**23
_NUM_REQUESTS = 4
_MAX_NAME = 4096


def check_name(folder: object, file: str) -> None:
    """Check the name of a file that was read from the metadata of a checkpoint.

    Raises:
        CheckpointError: the name is invalid, or leads out of `folder`.
    """
    if "\0" in file or not file or file.startswith("/") or ".." in file.split("/") or len(file) > _MAX_NAME:
        raise CheckpointError(
            f"{folder} is hostile: it refers to the file {file[:100]!r}, whose name is invalid or leads "
            "out of the folder."
        )


class LocalStorage:
    """A folder of checkpoint files in a file system of the operating system."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._maps: dict[str, memoryview] = {}

    def __str__(self) -> str:
        return str(self.path)

    def name(self, file: str) -> str:
        """Return the path of a file of this folder, for error messages."""
        return str(self.path / file)

    def create(self, file: str) -> ChecksummedWriter:
        """Create a file. It must not exist yet."""
        return ChecksummedWriter(open(self.path / file, "xb", buffering=2**20), on_disk=True)

    def size(self, file: str) -> int | None:
        """Return the size of a file in bytes; `None` if it does not exist.

        Raises:
            CheckpointError: its name or a link leads out of the folder, or the file is a FIFO, a socket or a device.
        """
        path = self._inside(file)
        with suppress(FileNotFoundError, NotADirectoryError):
            about = path.stat()
            check_regular(path, about.st_mode)
            return about.st_size if stat.S_ISREG(about.st_mode) else None
        return None

    def _inside(self, file: str) -> Path:
        check_name(self.path, file)
        path = self.path / file
        real = Path(os.path.realpath(path))
        if not real.is_relative_to(os.path.realpath(self.path)):
            raise CheckpointError(
                f"{path} is a link that leads out of the checkpoint, to {real}. Replace the link by a copy of the file."
            )
        return path

    def hold(self, file: str) -> None:
        """Memory-map a file, so that later reads return this version even if a save replaces the folder."""
        if file not in self._maps:
            with open(open_regular(self._inside(file)), "rb", buffering=0) as opened:
                size = os.fstat(opened.fileno()).st_size
                # Private and writable, because torch warns about read-only memory.
                access = (mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
                self._maps[file] = memoryview(mmap.mmap(opened.fileno(), 0, *access) if size else b"")

    def read(self, file: str, offset: int, length: int) -> memoryview:
        """Return the `length` bytes of a file that begin at `offset`, memory-mapped.

        Raises:
            CheckpointError: the file is too short.
        """
        self.hold(file)
        check_range(self.name(file), offset, length, len(self._maps[file]))
        return self._maps[file][offset : offset + length]

    def checksums(self, file: str, blocks: Sequence[Block]) -> list[int]:
        """Return the checksum of each of `blocks`."""
        with open(open_regular(self._inside(file)), "rb", buffering=0) as opened:
            return [checksum_of_block(opened, *block) for block in blocks]


def check_range(name: str, offset: int, length: int, size: int) -> None:
    """Raise a `CheckpointError` if a file of `size` bytes does not have `length` bytes at `offset`."""
    if offset < 0 or length < 0 or offset + length > size:
        raise CheckpointError(f"{name} is damaged: it has {size} bytes, so it has no {length} bytes at {offset}.")


class FsspecStorage:
    """A folder of checkpoint files at a URL, accessed by fsspec."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self.fs, self.path = file_system(self.url)
        self._ahead: tuple[str, int, bytes] = ("", 0, b"")
        self._sizes: dict[str, int] = {}

    def __str__(self) -> str:
        return self.url

    def name(self, file: str) -> str:
        """Return the URL of a file of this folder, for error messages."""
        return f"{self.url}/{file}"

    def create(self, file: str) -> ChecksummedWriter:
        """Create or replace a file. It becomes visible when it is closed."""
        self.fs.makedirs(self.path, exist_ok=True)
        return ChecksummedWriter(self.fs.open(f"{self.path}/{file}", "wb"), on_disk=False)

    def remove_except(self, files: set[str]) -> None:
        """Remove the files of other saves: all checkpoint files except `files`, and a file with the folder's name."""
        if self.fs.isfile(self.path):  # in an object store, a file may have the same name as a folder
            self.fs.rm_file(self.path)
        for name in inspect(self.fs, self.path)[0]:
            if name not in files:
                self.fs.rm_file(f"{self.path}/{name}")

    def size(self, file: str) -> int | None:
        """Return the size of a file in bytes; `None` if it does not exist.

        Raises:
            CheckpointError: its name leads out of the folder.
        """
        check_name(self.url, file)
        if file not in self._sizes:
            path = f"{self.path}/{file}"
            if not self.fs.isfile(path):
                return None
            self._sizes[file] = int(self.fs.size(path))
        return self._sizes[file]

    def hold(self, file: str) -> None:
        """Do nothing: another save uses different file names, so it does not replace this file."""

    def read(self, file: str, offset: int, length: int) -> memoryview:
        """Return the `length` bytes of a file that begin at `offset`. Reads ahead, for sequential access.

        Raises:
            CheckpointError: the file is too short.
        """
        check_range(self.name(file), offset, length, self.size(file) or 0)
        name, start, data = self._ahead
        if name != file or offset < start or offset + length > start + len(data):
            start, data = offset, self._read(file, offset, max(length, _AHEAD_BYTES))
            self._ahead = (file, start, data)
        return memoryview(bytearray(data[offset - start : offset - start + length]))

    def checksums(self, file: str, blocks: Sequence[Block]) -> list[int]:
        """Return the checksum of each of `blocks`. Several requests run at the same time."""
        with ThreadPoolExecutor(_NUM_REQUESTS) as requests:
            return list(requests.map(lambda block: checksum(self._read(file, *block)), blocks))

    def _read(self, file: str, offset: int, length: int) -> bytes:
        # Pass `start` by keyword, because the second positional parameter differs between file systems.
        data: bytes = self.fs.cat_file(f"{self.path}/{file}", start=offset, end=offset + length)
        return data


Folder = LocalStorage | FsspecStorage


def folder_at(path: str | Path) -> Folder:
    """Return the folder at a path or URL."""
    return FsspecStorage(str(path)) if is_remote(path) else LocalStorage(path)


def remove_at(path: str) -> None:
    """Remove the checkpoint at a path or URL, if there is one.

    A file is removed whatever it contains. Files in a folder that do not belong to a checkpoint are kept, with a
    warning.
    """
    if not is_remote(path):
        remove(Path(path))
        return
    fs, name = file_system(path)
    if fs.isfile(name):
        fs.rm_file(name)
    if fs.isdir(name) and not remove_beside_others(fs, name, path):
        fs.rm(name, recursive=True)


# URLs


def file_system(url: str) -> tuple[Any, str]:
    """Return the fsspec file system of a URL, and the path in it.

    Raises:
        CheckpointError: no installed package supports the scheme of the URL.
    """
    try:
        fs, path = url_to_fs(url)
        fs.invalidate_cache()  # it caches listings and sizes, which other ranks may have changed
        return fs, path
    except (ImportError, ValueError) as error:
        extra = _EXTRAS.get(url.split("://")[0])
        remedy = f"Run pip install 'lightning_paral[{extra}]'." if extra else "Use a scheme that fsspec supports."
        raise CheckpointError(f"{url} cannot be accessed: {error}. {remedy}") from error


def is_remote(path: object) -> bool:
    """Return whether `path` is a URL of a file system other than the operating system's."""
    return "://" in str(path) and type(file_system(str(path))[0]) is not LocalFileSystem


def without_scheme(path: object) -> str:
    """Return `path` without `file://`; other URLs are returned unchanged."""
    return str(path) if "://" not in str(path) or is_remote(path) else file_system(str(path))[1]


def put_file(source: Path, url: str) -> None:
    """Copy a local file to a URL, replacing a file or checkpoint there.

    Raises:
        CheckpointError: a folder that is not a checkpoint exists at the URL.
    """
    fs, path = file_system(url)
    fs.makedirs(path.rpartition("/")[0] or fs.root_marker, exist_ok=True)
    check_replaceable_at(fs, path, url, folder=False)
    if not fs.isdir(path):
        fs.put_file(str(source), path)
        return
    sibling = f"{path}.{source.name}"
    fs.put_file(str(source), sibling)  # before the folder is removed, because this may fail
    fs.rm(path, recursive=True)
    fs.mv(sibling, path)


def get_file(url: str) -> Path | None:
    """Copy the file at a URL to a temporary file, and return the path of the copy; `None` if there is no file."""
    fs, path = file_system(url)
    if not fs.isfile(path):
        return None
    descriptor, name = tempfile.mkstemp(prefix="lightning_paral_", suffix=".copy")
    os.close(descriptor)
    fs.get_file(path, name)
    return Path(name)
