"""Commit a checkpoint by one rename, and never replace or remove files that do not belong to a checkpoint.

A save writes its draft next to the target and renames it to the target, or swaps it with an old folder there. Until
then, the old checkpoint stays in place.
"""

import ctypes
import errno
import fcntl
import os
import re
import shutil
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from textwrap import shorten
from typing import Any

from fsspec.implementations.local import LocalFileSystem
from lightning.pytorch.utilities import rank_zero_warn

from lightning_paral.errors import CheckpointError

# Files of a Distributed Checkpoint, with the id of the save behind a URL: those that no other folder has, and all.
_IDENTIFYING = re.compile(r"\.metadata(-[0-9a-f]{12})?|__\d+_\d+([0-9a-f]{12})?\.distcp")
_OF_CHECKPOINT = re.compile(_IDENTIFYING.pattern + r"|meta\.pt(-[0-9a-f]{12})?|manifest\.json|\.metadata\.tmp")
_OF_SYSTEM = re.compile(r"\.DS_Store|\._.*|\.nfs[0-9a-f]+|Thumbs\.db|desktop\.ini", re.DOTALL)
_MANIFEST_START = b'{"checksum":"'
_ZIP_START = b"PK\x03\x04"
_START_BYTES = 2**20
_LISTED_CHARACTERS = 200

# The files of a save. `target` is the reversed name of the target, see `_siblings`.
_SAVE_NAME = re.compile(r"\.(?P<target>.+)\.(lock|saving|replaced)-(?P<save>lightning_paral-[0-9a-f]{16})", re.DOTALL)
_ABANDONED_AFTER_SECONDS = 24 * 3600

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


# What belongs to a checkpoint


def inspect(fs: Any, path: str) -> tuple[list[str], list[str]]:
    """Return the names of what belongs to a checkpoint at `path`, those that identify it first, and of all else.

    A file is a checkpoint if it is empty, or if `torch.save` wrote it and its beginning has the key `state_dict`. A
    folder is one if it has files of a Distributed Checkpoint. Nothing else in such a folder belongs to it, except files
    that operating systems create.

    Args:
        fs: an fsspec file system.
        path: a path in `fs`.
    """
    name = _last(path)
    if fs.isfile(path):
        start = _start_of(fs, path, _START_BYTES)
        is_own = not start or (start.startswith(_ZIP_START) and b"state_dict" in start)
        return ([name], []) if is_own else ([], [name])
    if not fs.isdir(path):
        return [], [name] if fs.exists(path) else []  # a FIFO, a socket or a device
    entries = {entry["name"].strip("/"): entry["type"] for entry in fs.ls(path, detail=True)}
    entries.pop(path.strip("/"), None)  # object stores may list the folder itself
    files = sorted(_last(entry) for entry, kind in entries.items() if kind == "file")
    if any(map(_IDENTIFYING.fullmatch, files)):
        own = [name for name in files if _OF_CHECKPOINT.fullmatch(name) or _OF_SYSTEM.fullmatch(name)]
        manifest = "manifest.json"
        if manifest in own and _start_of(fs, f"{path}/{manifest}", len(_MANIFEST_START)) != _MANIFEST_START:
            own.remove(manifest)
    else:
        own = files if len(files) == len(entries) and all(map(_OF_SYSTEM.fullmatch, files)) else []
    return own, sorted(set(map(_last, entries)) - set(own))


def _last(path: str) -> str:
    return path.rstrip("/").rsplit("/", 1)[-1]


def _start_of(fs: Any, path: str, nbytes: int) -> bytes:
    return bytes(fs.cat_file(path, start=0, end=nbytes))


def check_replaceable(target: Path, *, folder: bool) -> None:
    """Do the check of `check_replaceable_at` for a local path. A link to a checkpoint may be replaced as well."""
    fs, path = _local(target)
    if not target.is_symlink() or not inspect(fs, path)[0]:
        check_replaceable_at(fs, path, str(target), folder=folder)


def check_replaceable_at(fs: Any, path: str, name: str, *, folder: bool) -> None:
    """Check that saving a checkpoint deletes no files of the user.

    A checkpoint that is a file may replace any file, as with `torch.save`. One that is a folder may replace a file only
    if it is empty or a checkpoint. Both may replace a folder only if nothing else than a checkpoint is in it.

    Args:
        fs: the fsspec file system.
        path: the path in `fs` to save to.
        name: the path or URL that the user gave, for error messages.
        folder: whether the new checkpoint is a folder.

    Raises:
        CheckpointError: other files would be deleted. The message names them.
    """
    if not folder and fs.isfile(path):
        return
    _, others = inspect(fs, path)
    if others:
        raise CheckpointError(
            f"Saving to {name} would delete what does not belong to a checkpoint: {_listed(others)}. Move it "
            "elsewhere, or save under another name."
        )


def _listed(names: list[str]) -> str:
    return shorten(", ".join(names), _LISTED_CHARACTERS, placeholder=" ...")


def remove_beside_others(fs: Any, path: str, name: str) -> bool:
    """Remove only the files of a checkpoint if a folder has other files too, with a warning; return whether it has.

    Args:
        fs: the fsspec file system.
        path: the path in `fs` of the folder.
        name: the path or URL that the user gave, for the warning.
    """
    own, others = inspect(fs, path)
    if others:
        rank_zero_warn(f"{name} is kept, because it has files that do not belong to a checkpoint: {_listed(others)}.")
        for file in own:
            fs.rm_file(f"{path}/{file}")
    return bool(others)


def _local(path: Path) -> tuple[Any, str]:
    return LocalFileSystem(), str(path.absolute())


# Commit


class AtomicPath:
    """A new file or folder `path` next to `target`. `commit` renames it to `target`.

    A lock file next to them stays locked until the save ends or this process dies. The next save in the folder removes
    the files of saves whose lock is free.

    Args:
        target: the path of the checkpoint. Missing parent folders are created.
        folder: whether to create a folder instead of a file.

    Raises:
        CheckpointError: a save to `target` would delete files that do not belong to a checkpoint.
    """

    def __init__(self, target: Path, *, folder: bool) -> None:
        self.target = target
        self._is_folder = folder
        check_replaceable(target, folder=folder)
        target.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(target.parent)
        with ExitStack() as stack:
            self.path, self._replaced = stack.enter_context(_new_siblings(target))
            stack.callback(self._delete)  # before it exists: a signal may interrupt what follows
            if folder:
                self.path.mkdir()
            else:
                self.path.touch(exist_ok=False)
            self._undo = stack.pop_all()

    def __enter__(self) -> "AtomicPath":
        return self

    def __exit__(self, *_: object) -> None:
        self.discard()

    def commit(self) -> None:
        """Rename `path` to `target` in one step, then remove the old checkpoint.

        Raises:
            CheckpointError: files that do not belong to a checkpoint were created at `target` meanwhile, and would be
                deleted.
        """
        check_replaceable(self.target, folder=self._is_folder)
        if self._is_folder:
            sync_folder(self.path)
        replaces_folder = self.target.is_dir() and not self.target.is_symlink()
        # A rename cannot replace a folder that has files, nor a file by a folder.
        if not replaces_folder and not (self._is_folder and os.path.lexists(self.target)):
            os.replace(self.path, self.target)
        elif not exchange(self.path, self.target):
            self._replace_in_steps()
        sync_folder(self.target.parent)
        self.discard()

    def _replace_in_steps(self) -> None:
        """Swap `path` and `target` by renames. While `target` is missing, `resolve` finds the old checkpoint."""
        os.rename(self.target, self._replaced)
        try:
            os.rename(self.path, self.target)
        except BaseException:
            os.rename(self._replaced, self.target)
            raise
        os.rename(self._replaced, self.path)

    def discard(self) -> None:
        """Remove `path`, which after a swap is the old checkpoint, and the lock; `target` is unchanged."""
        self._undo.close()

    def _delete(self) -> None:
        with suppress(OSError):  # NFS keeps files that are still open; a later save removes them
            delete(self.path)


def exchange(first: Path, second: Path) -> bool:
    """Swap two paths in one step. Return `False` if this is not supported: on systems other than Linux, and on NFS."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "renameat2"):
        return False
    if libc.renameat2(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number not in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
        raise OSError(number, os.strerror(number), str(second))
    return False


def sync_folder(folder: Path) -> None:
    """Wait until the names in `folder` are on disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def delete(path: Path) -> None:
    """Delete a file, a link, or a folder and its contents. Do nothing if it does not exist."""
    with suppress(FileNotFoundError):  # another process may be deleting the same leftovers
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def remove(target: Path) -> None:
    """Remove the checkpoint `target` in one step, so that no process reads a part of it.

    A file is removed whatever it contains. Files in a folder that do not belong to a checkpoint are kept, with a
    warning.
    """
    for path in (*_replaced_versions(target), target):
        if path.is_symlink() or path.is_file():
            path.unlink()
        elif os.path.lexists(path) and not remove_beside_others(*_local(path), str(path)):
            with _new_siblings(target) as (draft, _):
                os.rename(path, draft)
                with suppress(OSError):
                    delete(draft)


# The files of saves that are running or were killed


def _siblings(target: Path, save: str) -> tuple[Path, Path, Path]:
    """Return the paths that a save uses next to `target`: of its lock, its draft, and the checkpoint it replaces.

    They contain the name of the target in reverse. Otherwise Lightning, which searches file names for `last` and
    `hpc_ckpt_`, would mistake the leftovers of a killed save for the newest checkpoint.
    """
    lock, draft, replaced = (f".{target.name[::-1]}.{role}-{save}" for role in ("lock", "saving", "replaced"))
    return target.with_name(lock), target.with_name(draft), target.with_name(replaced)


def _new_save_id() -> str:
    """Return a new id for the names of the files that a save creates next to its target."""
    return f"lightning_paral-{uuid.uuid4().hex[:16]}"


def _saves_in(folder: Path) -> set[tuple[Path, str]]:
    """Return the target and the id of each save that has files in `folder`."""
    matches = filter(None, map(_SAVE_NAME.fullmatch, os.listdir(folder)))
    return {(folder / match["target"][::-1], match["save"]) for match in matches}


@contextmanager
def _new_siblings(target: Path) -> Iterator[tuple[Path, Path]]:
    """Yield two of the `_siblings` of a new save, the draft and the replaced checkpoint; hold its lock meanwhile.

    NFS emulates the lock by a byte-range lock, for which the file must be open for writing:
    https://man7.org/linux/man-pages/man2/flock.2.html
    """
    while True:
        lock, draft, replaced = _siblings(target, _new_save_id())
        with open(lock, "xb") as file:
            try:
                with suppress(OSError):  # the file system has no locks, so the age of the file counts
                    fcntl.flock(file, fcntl.LOCK_EX)
                # Before it was locked, another process may have removed it as a leftover.
                if lock.exists() and os.fstat(file.fileno()).st_nlink:
                    yield draft, replaced
                    return
            finally:
                with suppress(OSError):
                    lock.unlink()


def _remove_if_abandoned(lock: Path) -> None:
    """Remove the lock file of a save that has ended: no process holds the lock.

    On file systems without locks, a save has ended if the file is more than a day old.

    Raises:
        OSError: the save may be running, or the file cannot be removed.
    """
    with suppress(FileNotFoundError), open(lock, "r+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise
        except OSError:
            if time.time() - os.fstat(file.fileno()).st_mtime < _ABANDONED_AFTER_SECONDS:
                raise
        lock.unlink()


def remove_leftovers(folder: Path) -> None:
    """Remove the files of killed saves in `folder`.

    If a killed save had renamed a checkpoint and not replaced it, the checkpoint gets its name back.
    """
    for target, save in _saves_in(folder):
        lock, draft, replaced = _siblings(target, save)
        with suppress(OSError):  # the save is running, or its files belong to another user
            _remove_if_abandoned(lock)
            if resolve(target) == replaced:
                os.rename(replaced, target)
            delete(draft)
            if os.path.lexists(replaced):
                os.rename(replaced, draft)  # if this process dies while deleting it, it must not look like a checkpoint
                delete(draft)


def resolve(target: Path) -> Path:
    """Return the current path of the checkpoint `target`.

    It differs from `target` if a save has renamed the old checkpoint and not yet replaced it.
    """
    for _ in range(3):  # a save may put the new checkpoint in place between the check and the search
        if os.path.lexists(target):
            break
        with suppress(FileNotFoundError):
            moved = _replaced_versions(target)
            if moved:
                return max(moved, key=lambda path: path.lstat().st_mtime)
    return target


def _replaced_versions(target: Path) -> list[Path]:
    """Return the paths to which saves have renamed the checkpoint `target`."""
    with suppress(OSError):
        paths = [_siblings(target, save)[2] for of, save in _saves_in(target.parent) if of == target]
        return [path for path in paths if os.path.lexists(path)]
    return []
