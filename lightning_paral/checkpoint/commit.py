"""From nothing, or an old checkpoint, to a new one in one step: a rename of what was written beside it."""

import ctypes
import errno
import fcntl
import os
import shutil
import uuid
from contextlib import suppress
from pathlib import Path

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_MARK = ".saving-"


class Draft:
    """A file or folder beside `target`, which takes its place when it is complete.

    Its name begins with a dot, and it is locked while the process that made it lives: drafts without a lock are
    leftovers of processes that died, and the next save in the folder removes them.
    """

    def __init__(self, target: Path, *, folder: bool) -> None:
        self.target = target
        target.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(target.parent)
        while True:
            self.path = beside(target)
            if folder:
                self.path.mkdir()
            else:
                self.path.touch(exist_ok=False)
            self._lock = os.open(self.path, os.O_RDONLY)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            if self.path.exists():
                break  # else another save has taken it for a leftover, in the moment before it was locked
            os.close(self._lock)

    def commit(self) -> None:
        """Put the draft in the place of the target, at once, and remove what was there."""
        if self.path.is_dir():
            _sync_folder(self.path)
        if self.target.is_symlink() or (self.target.exists() and (self.path.is_dir() or self.target.is_dir())):
            exchange(self.path, self.target)
            _sync_folder(self.target.parent)
            delete(self.path)
        else:
            os.replace(self.path, self.target)
            _sync_folder(self.target.parent)
        os.close(self._lock)

    def discard(self) -> None:
        """Remove the draft; the target stays as it is."""
        with suppress(OSError):
            delete(self.path)
        os.close(self._lock)


def beside(target: Path) -> Path:
    """Return a new path in the folder of `target` that is no checkpoint's."""
    return target.parent / f".{target.name}{_MARK}{uuid.uuid4().hex[:12]}"


def remove_leftovers(folder: Path) -> None:
    """Remove what processes that died have left in `folder`."""
    for path in folder.glob(f".*{_MARK}*"):
        with suppress(OSError):
            if path.is_symlink():
                path.unlink()
                continue
            lock = os.open(path, os.O_RDONLY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                delete(path)
            finally:
                os.close(lock)


def remove(target: Path) -> None:
    """Remove a checkpoint: it is gone at once, so that nobody meets a part of it."""
    if target.is_symlink() or target.is_file():
        target.unlink()
    elif target.exists():
        doomed = beside(target)
        os.rename(target, doomed)
        delete(doomed)


def delete(path: Path) -> None:
    """Delete a file, a link or a folder with all in it."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def exchange(first: Path, second: Path) -> None:
    """Swap two paths in one step, where the system can (Linux); else by two renames, between which `second` is away.

    Even then the old one stays complete beside, until the new one is in place.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if hasattr(libc, "renameat2"):
        if libc.renameat2(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE) == 0:
            return
        number = ctypes.get_errno()
        if number not in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
            raise OSError(number, os.strerror(number), str(second))
    old = beside(second)
    os.rename(second, old)
    os.rename(first, second)
    os.rename(old, first)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
