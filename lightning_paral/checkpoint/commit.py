"""From nothing, or an old checkpoint, to a new one in one step: a rename of what was written beside it."""

import ctypes
import errno
import os
import re
import shutil
import uuid
from contextlib import suppress
from pathlib import Path

from lightning_paral.checkpoint.lock import Lock, abandoned

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_BESIDE = re.compile(r"\.(?P<target>.+)\.(?P<role>saving|lock)-(?P<save>[0-9a-f]{12})", re.DOTALL)


class Draft:
    """A file or folder beside `target`, which takes its place when it is complete.

    A file beside both is locked while the process that made them lives. Drafts without such a lock are leftovers, and
    the next save in the folder removes them.
    """

    def __init__(self, target: Path, *, folder: bool) -> None:
        self.target = target
        target.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(target.parent)
        save = uuid.uuid4().hex[:12]
        self.path = _beside(target, "saving", save)
        self._lock = Lock(_beside(target, "lock", save))
        try:
            if folder:
                self.path.mkdir()
            else:
                self.path.touch(exist_ok=False)
        except BaseException:
            self._lock.release()
            raise

    def commit(self) -> None:
        """Put the draft in the place of the target, at once, and remove what was there."""
        if self.path.is_dir():
            _sync_folder(self.path)
        is_folder = self.target.is_dir() and not self.target.is_symlink()
        if is_folder or (self.path.is_dir() and os.path.lexists(self.target)):
            exchange(self.path, self.target)
        else:
            os.replace(self.path, self.target)
        _sync_folder(self.target.parent)
        self.discard()

    def discard(self) -> None:
        """Remove what is at the draft's path; the target stays as it is."""
        with suppress(OSError):  # NFS keeps files that are open: then it is a leftover
            delete(self.path)
        self._lock.release()


def _beside(target: Path, role: str, save: str) -> Path:
    """Return a path in the folder of `target` that is no checkpoint's."""
    return target.parent / f".{target.name}.{role}-{save}"


def remove_leftovers(folder: Path) -> None:
    """Remove what processes that died have left in `folder`."""
    found = filter(None, map(_BESIDE.fullmatch, os.listdir(folder)))
    for name, save in {(match["target"], match["save"]) for match in found}:
        target = folder / name
        lock = _beside(target, "lock", save)
        with suppress(OSError), abandoned(lock) as is_left:
            if is_left:
                delete(_beside(target, "saving", save))
                delete(lock)


def remove(target: Path) -> None:
    """Remove a checkpoint: it is gone at once, so that nobody meets a part of it."""
    if target.is_symlink() or target.is_file():
        target.unlink()
    elif target.exists():
        doomed = _beside(target, "saving", uuid.uuid4().hex[:12])
        os.rename(target, doomed)
        with suppress(OSError):
            delete(doomed)


def delete(path: Path) -> None:
    """Delete a file, a link or a folder with all in it, if it is there."""
    with suppress(FileNotFoundError):  # of leftovers, another process may be deleting the same
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


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
    old = _beside(second, "saving", uuid.uuid4().hex[:12])
    os.rename(second, old)
    os.rename(first, second)
    os.rename(old, first)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
