"""The manifest of a checkpoint: its form and origin, and the size and checksums of every file.

In a folder it is `manifest.json`, in a single file a record of the zip archive, which other readers ignore.
"""

import json
import os
import re
import zipfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lightning_paral.checkpoint.io.files import FileRecord, checksum, checksum_of_block, reader_of
from lightning_paral.checkpoint.safe_load.archive import open_regular, read_archive
from lightning_paral.errors import CheckpointError

FORMAT = 1
FILE_NAME = "manifest.json"
MAX_BYTES = 2**24
"""Size limit; the manifest of a checkpoint of 20 TB is smaller. Reading takes a small multiple of it."""

_RECORD = "lightning_paral.json"
_COMMENT = re.compile(rb"lightning_paral ([0-9a-f]{16}) ([0-9a-f]{16})")
_SUM_DIGITS = 16
_FREE_CONTAINERS = 100


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Describes a checkpoint and its files."""

    form: str
    strategy: str
    world_size: int
    epoch: int
    global_step: int
    files: dict[str, FileRecord]
    """Files by name relative to the folder. A full checkpoint has one, `"."`: its bytes before the manifest."""
    names: dict[str, str] = field(default_factory=dict)
    """Actual names of files whose usual name is another. Behind a URL, the files of a new save must not replace those
    of the old one before the manifest does."""
    format: int = FORMAT

    def to_json(self) -> str:
        """Return the manifest as JSON that includes its own checksum."""
        content = asdict(self)
        return _text(content | {"checksum": _checksum(content)})

    @staticmethod
    def from_json(text: str, name: str) -> "Manifest":
        """Return the manifest that `to_json` wrote.

        Args:
            text: the JSON.
            name: name of the file, for errors.

        Raises:
            CheckpointError: the text was changed, or has a format that this release does not know.
        """
        if len(text) > MAX_BYTES or text.count("[") + text.count("{") > _FREE_CONTAINERS + len(text) // 10:
            raise CheckpointError(f"{name} is damaged or hostile: it is too large or too nested for a manifest.")
        try:
            content = json.loads(text)
            own = content.pop("checksum")
            intact = own == _checksum(content) and text == _text(content | {"checksum": own})
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            intact = False
        if not intact:
            raise CheckpointError(f"{name} is damaged: it is not what was written.")
        if isinstance(content.get("format"), int) and content["format"] > FORMAT:
            raise CheckpointError(
                f"{name} is of format {content['format']}, this release reads up to {FORMAT}: upgrade lightning_paral."
            )
        try:
            return Manifest(
                **content | {"files": {file: _record(r) for file, r in content.pop("files").items()}}
            )._checked()
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{name} is damaged or hostile: it is no manifest ({error}).") from error

    def _checked(self) -> "Manifest":
        numbers = (self.world_size, self.epoch, self.global_step, self.format)
        if self.form not in ("full", "sharded") or not all(type(number) is int for number in numbers):
            raise ValueError("a field is of another type")
        if type(self.strategy) is not str or not all(type(name) is str for name in self.names.values()):
            raise ValueError("a name is no text")
        if self.form == "full" and set(self.files) != {"."}:
            raise ValueError("a single file names others")
        return self


def _record(found: dict[str, Any]) -> FileRecord:
    """Return the record of a file; raise unless its blocks cover each byte once."""
    blocks = [(offset, length, total) for offset, length, total in found["blocks"]]
    position = 0
    for offset, length, total in blocks:
        if not all(type(number) is int for number in (offset, length, total)) or offset != position or length <= 0:
            raise ValueError("blocks are not one behind the other")
        position += length
    if type(found["bytes"]) is not int or found["bytes"] != position:
        raise ValueError("blocks are not all of a file")
    return FileRecord(bytes=position, blocks=blocks)


def _text(content: dict[str, Any]) -> str:
    return json.dumps(content, sort_keys=True, separators=(",", ":")) + "\n"


def _checksum(content: dict[str, Any]) -> str:
    return f"{checksum(_text(content).encode()):016x}"


# In a single file


def embed(path: str | Path, make: Callable[[int], Manifest]) -> None:
    """Append a manifest to the zip archive at `path`.

    The comment at the end of the archive holds the offset of the manifest, and the checksum of all bytes from there on.

    Args:
        path: a file of `torch.save`.
        make: called with the offset of the manifest; returns the manifest with a record of the bytes before it.
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
    """Return the manifest in the file at `path`; `None` if it has none, as files of other tools.

    Raises:
        CheckpointError: the file is truncated or damaged.
    """
    name = str(path)
    descriptor = open_regular(path)
    try:
        nbytes = os.fstat(descriptor).st_size
        archive = read_archive(lambda offset, size: os.pread(descriptor, size, offset), nbytes, name)
        if archive is None:
            raise CheckpointError(f"{name} is damaged or truncated, or no checkpoint: it is no zip archive.")
        records = [record for key, record in archive.records.items() if key.endswith("/" + _RECORD)]
        if not records and not archive.comment.startswith(b"lightning_paral"):
            return None
        found = _COMMENT.fullmatch(archive.comment)
        if len(records) != 1 or found is None or int(found.group(1), 16) != records[0].header:
            raise CheckpointError(f"{name} is damaged: its manifest is broken.")
        if records[0].size > MAX_BYTES:
            raise CheckpointError(f"{name} is damaged or hostile: its manifest has {records[0].size} bytes.")
        start, expected = int(found.group(1), 16), int(found.group(2), 16)
        if checksum_of_block(reader_of(descriptor), start, nbytes - start - _SUM_DIGITS) != expected:
            raise CheckpointError(f"{name} is damaged: bytes from {start} on are not what was written.")
        text = os.pread(descriptor, records[0].size, records[0].start).decode(errors="replace")
    finally:
        os.close(descriptor)
    return Manifest.from_json(text, name)
