"""What shows that a checkpoint is whole: checksums of its files, and the manifest, with its format, origin and files.

Each block of 64 MiB has its own 64-bit XXH3 checksum (https://xxhash.com), so that several ranks can verify one file.
The checksums detect accidental damage, but not manipulation.

In a folder, the manifest is the file `manifest.json`. In a single file, it is a record of the zip archive, which other
readers ignore.
"""

import json
import os
import re
import zipfile
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from xxhash import xxh3_64, xxh3_64_intdigest

from lightning_paral.checkpoint.archive import open_regular, read_archive
from lightning_paral.errors import CheckpointError

FORMAT = 1
FILE_NAME = "manifest.json"
METADATA = ".metadata"
"""Name of the file with the location of each value, in the format of Distributed Checkpoint."""
META = "meta.pt"
"""Name of the file with everything except weights and optimizer state."""
MAX_BYTES = 2**24
"""Maximum size of a manifest, enough for a checkpoint of 20 TB. Reading it takes a small multiple of its size in
memory."""

_RECORD = "lightning_paral.json"
_COMMENT = re.compile(rb"lightning_paral ([0-9a-f]{16}) ([0-9a-f]{16})")
_SUM_DIGITS = 16
_FREE_CONTAINERS = 100  # JSON arrays and objects that a manifest of any size may have

BLOCK_BYTES = 64 * 2**20
_STEP_BYTES = 2**20  # small enough to stay in the CPU cache between reading and hashing
_FLUSH_BYTES = 128 * 2**20
_flush_data = getattr(os, "fdatasync", os.fsync)  # macOS has fsync only

Block = tuple[int, int]
"""Offset and length."""


@dataclass(frozen=True, kw_only=True)
class FileRecord:
    """The size and checksums of a file."""

    bytes: int
    """The size in bytes."""
    blocks: list[tuple[int, int, int]] = field(default_factory=list)
    """Offset, length and checksum of each block, in order and without gaps."""


def checksum(data: bytes | memoryview) -> int:
    """Return the checksum of `data`."""
    return xxh3_64_intdigest(data)


def checksum_of_block(file: BinaryIO, offset: int, length: int) -> int:
    """Return the checksum of the `length` bytes of an unbuffered file that begin at `offset`.

    Raises:
        CheckpointError: the file ends before.
    """
    total, buffer = xxh3_64(), memoryview(bytearray(min(_STEP_BYTES, length)))
    file.seek(offset)
    while length:
        count = file.readinto(buffer[:length])  # type: ignore[attr-defined]
        if not count:
            raise CheckpointError(f"A file ended {length} bytes before it should.")
        total.update(buffer[:count])
        length -= count
    return total.intdigest()


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
        self._blocks: list[tuple[int, int, int]] = []
        self._sum = xxh3_64()
        self.position = 0
        """Number of bytes written."""
        self.error: BaseException | None = None
        """The error of the last write. It is kept because `torch.save` replaces it by another error."""

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
        self._add(view)
        return len(view)

    def _add(self, data: memoryview) -> None:
        """Add bytes to the checksums."""
        while len(data):
            taken = data[: BLOCK_BYTES - self.position % BLOCK_BYTES]
            self._sum.update(taken)
            self.position += len(taken)
            data = data[len(taken) :]
            if self.position % BLOCK_BYTES == 0:
                self._end_block()

    def _end_block(self) -> None:
        start = len(self._blocks) * BLOCK_BYTES
        self._blocks.append((start, self.position - start, self._sum.intdigest()))
        self._sum.reset()

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
        if self.position % BLOCK_BYTES:
            self._end_block()
        return FileRecord(bytes=self.position, blocks=self._blocks)

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


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Describes a checkpoint and its files."""

    form: str
    """`"full"` or `"sharded"`."""
    strategy: str
    """The name of the strategy that saved the checkpoint."""
    world_size: int
    """The number of ranks that saved it."""
    epoch: int
    global_step: int
    files: dict[str, FileRecord]
    """Files by name relative to the folder. A full checkpoint has one, `"."`: its bytes before the manifest."""
    names: dict[str, str] = field(default_factory=dict)
    """Maps the usual names of files to their actual names where these differ. At a URL, the files of a new save have
    different names, because they must not replace the old files before the manifest is replaced."""
    format: int = FORMAT
    """The version of the manifest's format."""

    def to_json(self) -> str:
        """Return the manifest as JSON, including a checksum of itself."""
        return sealed(asdict(self))

    @staticmethod
    def from_json(text: str, name: str) -> "Manifest":
        """Return the manifest that `to_json` wrote.

        Args:
            text: the JSON.
            name: the name of the file, for error messages.

        Raises:
            CheckpointError: the text was changed, or has a format that this release does not support.
        """
        if len(text) > MAX_BYTES or text.count("[") + text.count("{") > _FREE_CONTAINERS + len(text) // 10:
            raise CheckpointError(
                f"{name} is damaged or hostile: it is too large for a manifest, or has too many lists and dicts."
            )
        try:
            content = json.loads(text)
            del content["checksum"]
            is_intact = text == sealed(content)
        except (ValueError, KeyError, TypeError, RecursionError):
            is_intact = False
        if not is_intact:
            raise CheckpointError(f"{name} is damaged: its checksum does not match its content.")
        if isinstance(content.get("format"), int) and content["format"] > FORMAT:
            raise CheckpointError(
                f"{name} has format {content['format']}, but this release reads formats up to {FORMAT}. Upgrade "
                "lightning_paral."
            )
        try:
            files = {file: _record(found) for file, found in content.pop("files").items()}
            return Manifest(files=files, **content)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{name} is damaged or hostile: it is not a manifest ({error}).") from error

    def __post_init__(self) -> None:
        """Raise a `ValueError` if a field is invalid."""
        numbers = (self.world_size, self.epoch, self.global_step, self.format)
        if self.form not in ("full", "sharded") or not all(type(number) is int for number in numbers):
            raise ValueError("a field has the wrong type")
        if type(self.strategy) is not str or not all(type(name) is str for name in self.names.values()):
            raise ValueError("a name is not a string")
        if self.form == "full" and set(self.files) != {"."}:
            raise ValueError("it is the manifest of a single file, but lists other files")


def _record(found: dict[str, Any]) -> FileRecord:
    """Return the record of a file. Raise a `ValueError` unless its blocks cover each byte exactly once."""
    blocks = [(offset, length, total) for offset, length, total in found["blocks"]]
    position = 0
    for offset, length, total in blocks:
        if not all(type(number) is int for number in (offset, length, total)) or offset != position or length <= 0:
            raise ValueError("blocks are not contiguous")
        position += length
    if type(found["bytes"]) is not int or found["bytes"] != position:
        raise ValueError("blocks do not cover the file")
    return FileRecord(bytes=position, blocks=blocks)


def sealed(content: dict[str, Any]) -> str:
    """Return `content` as JSON, including a checksum of it."""
    return _text(content | {"checksum": f"{checksum(_text(content).encode()):016x}"})


def _text(content: dict[str, Any]) -> str:
    return json.dumps(content, sort_keys=True, separators=(",", ":")) + "\n"


# In a single file


def embed(path: str | Path, make: Callable[[int], Manifest]) -> None:
    """Append a manifest to the zip archive at `path`.

    The comment at the end of the archive contains the offset of the manifest, and a checksum of all bytes from this
    offset to the end of the file.

    Args:
        path: a file written by `torch.save`.
        make: called with the offset of the manifest; returns the manifest, with a record of the bytes before it.
    """
    with zipfile.ZipFile(path, "a") as archive:
        start = archive.start_dir
        top = archive.namelist()[0].split("/")[0]
        archive.writestr(f"{top}/{_RECORD}", make(start).to_json())
        archive.comment = b"lightning_paral %016x %016x" % (start, 0)
    with open(path, "r+b") as file:
        file.seek(start)
        tail = file.read()[:-_SUM_DIGITS]
        file.seek(start + len(tail))
        file.write(b"%016x" % checksum(tail))
        file.flush()
        os.fsync(file.fileno())


def extract(path: str | Path) -> Manifest | None:
    """Return the manifest in the file at `path`; `None` if there is none, because another tool wrote the file.

    Raises:
        CheckpointError: the file is truncated or damaged.
    """
    name = str(path)
    with open(open_regular(path), "rb", buffering=0) as file:
        nbytes = os.fstat(file.fileno()).st_size
        archive = read_archive(lambda offset, size: os.pread(file.fileno(), size, offset), nbytes, name)
        if archive is None:
            raise CheckpointError(f"{name} is damaged, truncated or not a checkpoint: it is not a zip archive.")
        records = [record for key, record in archive.records.items() if key.endswith("/" + _RECORD)]
        if not records and not archive.comment.startswith(b"lightning_paral"):
            return None
        found = _COMMENT.fullmatch(archive.comment)
        if len(records) != 1 or found is None or int(found[1], 16) != records[0].header:
            raise CheckpointError(f"{name} is damaged: its manifest is broken.")
        if records[0].size > MAX_BYTES:
            raise CheckpointError(f"{name} is damaged or hostile: its manifest has {records[0].size} bytes.")
        start, expected = int(found[1], 16), int(found[2], 16)
        if checksum_of_block(file, start, nbytes - start - _SUM_DIGITS) != expected:
            raise CheckpointError(f"{name} is damaged: the checksum of its last bytes, from {start}, does not match.")
        text = os.pread(file.fileno(), records[0].size, records[0].start).decode(errors="replace")
    return Manifest.from_json(text, name)
