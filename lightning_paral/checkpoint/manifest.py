"""The manifest of a checkpoint: what it is, and size and checksums of every file, so that damage is found and named.

A folder holds it as `manifest.json`, a single file as a record inside its zip archive, which other readers ignore.
"""

import json
import os
import re
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lightning_paral.checkpoint.checksums import FileRecord, checksum
from lightning_paral.errors import CheckpointError

FORMAT = 1
FILE_NAME = "manifest.json"
_RECORD = "lightning_paral.json"
_COMMENT = re.compile(rb"lightning_paral ([0-9a-f]{16}) ([0-9a-f]{16})")
_SUM_DIGITS = 16


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
            own = content.pop("checksum")
            intact = own == _checksum(content) and text == _text(content | {"checksum": own})
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
    return f"{checksum(_text(content).encode()):016x}"


# In a single file


def embed(path: str | Path, make: Callable[[int], Manifest]) -> None:
    """Add a manifest to the zip archive at `path`, of which `make(nbytes)` knows the first `nbytes` bytes.

    The archive's comment, at the very end, says where the manifest begins, and the checksum of all from there on.
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
    start, expected = int(found.group(1), 16), int(found.group(2), 16)
    with open(path, "rb") as file:
        file.seek(start)
        if checksum(file.read()[:-_SUM_DIGITS]) != expected:
            raise CheckpointError(f"{name} is damaged: bytes from {start} on are not what was written.")
    return Manifest.from_json(text, name)
