"""Distinguish checkpoints from other files, so that saving and removing checkpoints never deletes files of the user."""

import os
import re
import stat
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_paral.checkpoint.safe_load.archive import Read, read_archive
from lightning_paral.errors import CheckpointError

_MAX_LISTED = 4
_SYSTEM_FILE = re.compile(r"\.DS_Store|\._.*|\.nfs[0-9a-f]+|Thumbs\.db|desktop\.ini", re.DOTALL)
"""Files that operating systems create in folders."""

_DCP_FILE = re.compile(
    r"(\.metadata|meta\.pt)(-[0-9a-f]{12})?|\.metadata\.tmp|manifest\.json|__\d+_\d+([0-9a-f]{12})?\.distcp"
)
"""Files of a Distributed Checkpoint. At a URL, their names contain the id of the save."""
_DCP_REQUIRED_FILE = re.compile(r"\.metadata(-[0-9a-f]{12})?|__\d+_\d+([0-9a-f]{12})?\.distcp")
"""Files that identify a folder as a Distributed Checkpoint."""

_DEEPSPEED_FILES = ("latest", "zero_to_fp32.py")
_DEEPSPEED_STATES = re.compile(r"(bf16_|fp16_)?(zero_pp_rank_\d+_)?mp_rank_\d+(_\d+)?_(model|optim)_states\.pt")
_MANIFEST_START = b'{"checksum":"'
_MAX_PICKLE_BYTES = 2**26
_MAX_TAG_BYTES = 4096


@dataclass(frozen=True, kw_only=True)
class PathContents:
    """What is at a path: a checkpoint, other files, or nothing."""

    what: str
    """A short description, such as "an empty folder", for messages."""
    is_file: bool = False
    is_checkpoint: bool = False
    is_empty: bool = False
    own: list[str] = field(default_factory=list)
    """Names of the files and folders of the checkpoint; those that identify it as a checkpoint come first."""
    foreign: list[str] = field(default_factory=list)
    """Names of other files and folders."""

    @property
    def listed(self) -> str:
        """The first names in `foreign`, for messages."""
        more = f" and {len(self.foreign) - _MAX_LISTED} more" if len(self.foreign) > _MAX_LISTED else ""
        return ", ".join(self.foreign[:_MAX_LISTED]) + more


def check_replaceable(target: Path, *, folder: bool) -> None:
    """Check that saving a checkpoint to `target` deletes no files of the user.

    A checkpoint that is a file may replace any file, as with `torch.save`. A checkpoint that is a folder may replace a
    file only if it is empty or is a checkpoint. Both may replace a folder only if it is empty, or is a checkpoint
    without other files.

    Args:
        target: the path to save to.
        folder: whether the new checkpoint is a folder.

    Raises:
        CheckpointError: other files would be deleted. The message names them.
    """
    if not os.path.lexists(target) or (target.is_file() and not folder):
        return
    found = inspect_path(target)
    if target.is_symlink() and found.is_checkpoint:
        return  # only the link is replaced; the checkpoint it points to is kept
    _check(target, found)


def check_replaceable_at(fs: Any, path: str, url: str, *, folder: bool) -> None:
    """Do the check of `check_replaceable` for a URL.

    Args:
        fs: the fsspec file system of the URL.
        path: the path in `fs`.
        url: the URL, for error messages.
        folder: whether the new checkpoint is a folder.

    Raises:
        CheckpointError: other files would be deleted. The message names them.
    """
    if folder and fs.isfile(path):
        _check(url, PathContents(what="a file", is_file=True, is_checkpoint=_is_remote_checkpoint(fs, path)))
    if fs.isdir(path):
        _check(url, inspect_remote_folder(fs, path))


def _check(target: object, found: PathContents) -> None:
    """Raise a `CheckpointError` unless `found`, which is at `target`, is empty or a checkpoint without other files."""
    if found.is_empty or (found.is_checkpoint and not found.foreign):
        return
    if found.is_checkpoint:
        raise CheckpointError(
            f"There is a checkpoint at {target}, but its folder contains other files: {found.listed}. Saving there "
            "would delete them. Move them elsewhere, or save under another name."
        )
    content = f", which contains {found.listed}" if found.foreign else ""
    example = f", such as {target}/last.ckpt" if found.foreign else ""
    raise CheckpointError(
        f"There is {found.what} at {target}{content}, but it is not a checkpoint. Saving there would delete it. Save "
        f"under another name{example}, or remove it first."
    )


def inspect_path(path: Path) -> PathContents:
    """Describe what is at `path`. If it is a link, describe its target."""
    try:
        about = path.stat()
    except OSError:
        return PathContents(what="a broken link", is_empty=True)
    if stat.S_ISREG(about.st_mode):
        is_checkpoint = _is_local_checkpoint(path)
        return PathContents(what="a file", is_file=True, is_empty=about.st_size == 0, is_checkpoint=is_checkpoint)
    if not stat.S_ISDIR(about.st_mode):
        return PathContents(what="a FIFO, a socket or a device")
    names = os.listdir(path)
    folders = {name: os.listdir(path / name) for name in names if (path / name).is_dir()}
    return classify_folder(
        [name for name in names if name not in folders], folders, lambda name: _start_of(path / name)
    )


def inspect_remote_folder(fs: Any, path: str) -> PathContents:
    """Describe the folder at `path` of the fsspec file system `fs`."""
    entries = {_last(entry["name"]): entry["type"] for entry in fs.ls(path, detail=True)}
    entries.pop(_last(path), None)  # object stores may list the folder itself
    folders = {
        name: [_last(inner) for inner in fs.ls(f"{path}/{name}", detail=False)]
        for name, entry_type in entries.items()
        if entry_type == "directory"
    }

    def start_of(name: str) -> bytes:
        return bytes(fs.cat_file(f"{path}/{name}", start=0, end=_MAX_TAG_BYTES))

    return classify_folder([name for name in entries if name not in folders], folders, start_of)


def _last(path: object) -> str:
    return str(path).rstrip("/").rsplit("/", 1)[-1]


def classify_folder(
    files: Iterable[str], folders: dict[str, list[str]], start_of: Callable[[str], bytes]
) -> PathContents:
    """Describe a folder, given its content.

    Args:
        files: the names of its files.
        folders: the names of its subfolders, each with the names of the entries in it.
        start_of: returns the first bytes of a file, given its name.
    """
    files = sorted(files)
    system_files = [name for name in files if _SYSTEM_FILE.fullmatch(name)]
    others = [name for name in files if name not in system_files]
    if not others and not folders:
        return PathContents(what="an empty folder", is_empty=True, own=system_files)
    if any(_DCP_REQUIRED_FILE.fullmatch(name) for name in others):
        own = [name for name in others if _DCP_FILE.fullmatch(name)]
        if "manifest.json" in own and not start_of("manifest.json").startswith(_MANIFEST_START):
            own.remove("manifest.json")
        own.sort(key=lambda name: not _DCP_REQUIRED_FILE.fullmatch(name) or name.endswith(".distcp"))
    elif _is_deepspeed(others, folders, start_of):
        own = [*(name for name in _DEEPSPEED_FILES if name in others), *folders]
    else:
        return PathContents(what="a folder", foreign=[*others, *folders])
    foreign = [name for name in (*others, *folders) if name not in own]
    return PathContents(what="a checkpoint", is_checkpoint=True, own=[*own, *system_files], foreign=foreign)


def _is_deepspeed(files: list[str], folders: dict[str, list[str]], start_of: Callable[[str], bytes]) -> bool:
    """Return whether a folder is one DeepSpeed checkpoint. A folder with several tags contains several checkpoints."""
    if len(folders) != 1 or "latest" not in files:
        return False
    ((tag, states),) = folders.items()
    is_named = start_of("latest").strip() == os.fsencode(tag)
    own = [name for name in states if _DEEPSPEED_STATES.fullmatch(name)]
    return is_named and bool(own) and all(name in own or _SYSTEM_FILE.fullmatch(name) for name in states)


def _is_local_checkpoint(path: Path) -> bool:
    with suppress(OSError), open(path, "rb", buffering=0) as file:
        return _is_checkpoint(lambda offset, size: os.pread(file.fileno(), size, offset), path.stat().st_size)
    return False


def _is_remote_checkpoint(fs: Any, path: str) -> bool:
    return _is_checkpoint(lambda at, size: bytes(fs.cat_file(path, start=at, end=at + size)), int(fs.size(path)))


def _is_checkpoint(read: Read, nbytes: int) -> bool:
    """Return whether the file was written by `torch.save` and contains a `state_dict`."""
    with suppress(CheckpointError):
        archive = read_archive(read, nbytes, "")
        for name, record in archive.records.items() if archive is not None else ():
            if name.endswith("/data.pkl"):
                return b"state_dict" in read(record.start, min(record.size, _MAX_PICKLE_BYTES))
    return False


def _start_of(path: Path) -> bytes:
    with suppress(OSError):
        if stat.S_ISREG(path.stat().st_mode):
            with open(path, "rb") as file:
                return file.read(_MAX_TAG_BYTES)
    return b""
