"""Folders of files, on a local or shared file system or behind fsspec (`s3://`, `memory://`)."""

import mmap
import os
import tempfile
from contextlib import nullcontext, suppress
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from lightning_paral.checkpoint.checksums import BlockChecksums, FileRecord, reader_of
from lightning_paral.checkpoint.flushing import Flushing
from lightning_paral.errors import CheckpointError

_MADV_POPULATE_READ = 22  # not in Python's mmap yet
_LARGE_BYTES = 2**20


_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs", "abfs": "azure", "abfss": "azure", "az": "azure"}


def file_system(url: str) -> tuple[Any, str]:
    """Return the file system of a URL, and the path there.

    Raises:
        CheckpointError: nothing that is installed knows such URLs.
    """
    try:
        found, path = url_to_fs(url)
        found.invalidate_cache()  # it remembers listings, and sizes from them, that other ranks have made old
        return found, path
    except (ImportError, ValueError) as error:
        extra = _EXTRAS.get(url.split("://")[0])
        remedy = f"pip install 'lightning_paral[{extra}]' brings it." if extra else "fsspec has to know the scheme."
        raise CheckpointError(f"There is no access to {url}: {error}. {remedy}") from error


def is_remote(path: object) -> bool:
    """Whether `path` is a URL of a file system other than the operating system's."""
    return "://" in str(path) and type(file_system(str(path))[0]) is not LocalFileSystem


def without_scheme(path: object) -> str:
    """Return a path of the operating system's file system without `file://`, and any other URL as it is."""
    return str(path) if "://" not in str(path) or is_remote(path) else file_system(str(path))[1]


class Writing:
    """A new file that is written from its beginning to its end; flushed to the disk when closed without an error."""

    def __init__(self, file: BinaryIO, *, on_disk: bool) -> None:
        self._file = file
        self._flushing = Flushing(file.fileno()) if on_disk else None  # an upload lasts when it is closed
        self._checksums = BlockChecksums()
        self.error: OSError | None = None
        """What the last write failed of: `torch.save` raises an error of its own in its place."""

    @property
    def position(self) -> int:
        """Number of bytes written."""
        return self._checksums.position

    def write(self, data: Any) -> int:
        """Append bytes."""
        view = memoryview(data).cast("B")
        try:
            self._file.write(view)
            if self._flushing is not None:
                self._flushing.wrote(len(view))
        except OSError as error:
            self.error = error
            raise
        self._checksums.update(view)
        return len(view)

    def pad(self, alignment: int) -> None:
        """Append zeros until the position is a multiple of `alignment`."""
        self.write(bytes(-self.position % alignment))

    def flush(self) -> None:
        """Nothing: it is flushed when it is closed."""

    def record(self) -> FileRecord:
        """Return size and checksums of what was written."""
        return self._checksums.record()

    def __enter__(self) -> "Writing":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._file, self._flushing or nullcontext():
            if error is None:
                self._file.flush()
                if self._flushing is not None:
                    self._flushing.finish()
            elif self.error is not None:
                raise self.error


class LocalFolder:
    """Files in a folder of the operating system."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._maps: dict[str, memoryview] = {}
        self._opened: dict[str, FileIO] = {}

    def __str__(self) -> str:
        return str(self.path)

    def name(self, file: str) -> str:
        """Return what errors call a file of this folder."""
        return str(self.path / file)

    def create(self, file: str) -> Writing:
        """Return a new file."""
        return Writing(open(self.path / file, "xb", buffering=2**20), on_disk=True)

    def size(self, file: str) -> int | None:
        """Return the size of a file in bytes, `None` if there is none."""
        path = self.path / file
        return path.stat().st_size if path.is_file() else None

    def read(self, file: str, offset: int, length: int) -> memoryview:
        """Return bytes of a file: mapped, not read."""
        if file not in self._maps:
            with open(self.path / file, "rb") as opened:
                size = os.fstat(opened.fileno()).st_size
                # Private and writable: torch warns of memory it may not write.
                access = (mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
                self._maps[file] = memoryview(mmap.mmap(opened.fileno(), 0, *access) if size else b"")
        if length >= _LARGE_BYTES:
            self._populate(file, offset, length)
        return self._maps[file][offset : offset + length]

    def _populate(self, file: str, offset: int, length: int) -> None:
        """Map a stretch at once, where the system can (Linux 5.14), and not page by page as it is touched."""
        start = offset - offset % mmap.PAGESIZE
        with suppress(OSError, ValueError):
            mapped: Any = self._maps[file].obj
            mapped.madvise(_MADV_POPULATE_READ, start, offset + length - start)

    def read_into(self, file: str, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` with bytes of a file from `offset` on."""
        if file not in self._opened:
            self._opened[file] = FileIO(self.path / file)
        reader_of(self._opened[file].fileno())(offset, buffer)


class RemoteFolder:
    """Files below a URL, by fsspec."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self.fs, self.path = file_system(self.url)

    def __str__(self) -> str:
        return self.url

    def name(self, file: str) -> str:
        """Return what errors call a file of this folder."""
        return f"{self.url}/{file}"

    def create(self, file: str) -> Writing:
        """Return a new file; it exists when it is closed."""
        self.fs.makedirs(self.path, exist_ok=True)
        return Writing(self.fs.open(f"{self.path}/{file}", "wb"), on_disk=False)

    def keep(self, files: set[str]) -> None:
        """Remove all other files of the folder: those of saves before, and of saves that did not end."""
        for path in self.fs.ls(self.path, detail=False):
            if str(path).rsplit("/", 1)[-1] not in files:
                self.fs.rm(path)

    def size(self, file: str) -> int | None:
        """Return the size of a file in bytes, `None` if there is none."""
        path = f"{self.path}/{file}"
        return int(self.fs.size(path)) if self.fs.isfile(path) else None

    def read(self, file: str, offset: int, length: int) -> memoryview:
        """Return bytes of a file."""
        return memoryview(bytearray(self._read(file, offset, length)))

    def read_into(self, file: str, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` with bytes of a file from `offset` on."""
        buffer[:] = self._read(file, offset, len(buffer))

    def _read(self, file: str, offset: int, length: int) -> bytes:
        # By keyword: file systems put different parameters in the second place.
        data: bytes = self.fs.cat_file(f"{self.path}/{file}", start=offset, end=offset + length)
        return data


def put_file(source: Path, url: str) -> None:
    """Copy a local file to a URL, in place of what is there."""
    fs, path = file_system(url)
    if fs.isdir(path):
        fs.rm(path, recursive=True)
    fs.makedirs(fs._parent(path), exist_ok=True)
    fs.put_file(str(source), path)


def get_file(url: str) -> Path | None:
    """Copy the file at a URL to a temporary one; `None` if it is a folder, or nothing."""
    fs, path = file_system(url)
    if not fs.isfile(path):
        return None
    descriptor, name = tempfile.mkstemp(prefix="lightning_paral_", suffix=".ckpt")
    os.close(descriptor)
    fs.get_file(path, name)
    return Path(name)


Folder = LocalFolder | RemoteFolder


def folder_at(path: str | Path) -> Folder:
    """Return the folder at a path or URL."""
    return RemoteFolder(str(path)) if is_remote(path) else LocalFolder(path)
