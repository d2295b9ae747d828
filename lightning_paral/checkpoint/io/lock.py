"""Telling what is being worked on from what a dead process left: a small file beside it, locked by its owner."""

import errno
import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

# The last is NFS's word for a file that is gone.
_UNSUPPORTED = (errno.EINVAL, errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ESTALE)
_LEFT_AFTER_SECONDS = 24 * 3600


class Lock:
    """A new file that is locked until it is released or its process dies.

    Where the file system has no locks it tells its age only. NFS turns the lock into one of byte ranges, for which a
    file has to be open for writing: https://man7.org/linux/man-pages/man2/flock.2.html
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            _locked(self._descriptor, fcntl.LOCK_EX)
        except BaseException:
            self.release()
            raise

    @property
    def is_kept(self) -> bool:
        """Whether nobody took the file for a leftover, in the moment before it was locked."""
        with suppress(OSError):
            return os.fstat(self._descriptor).st_nlink > 0 and self._path.exists()
        return False

    def release(self) -> None:
        """Remove the file; a second time there is nothing to do."""
        if self._descriptor < 0:
            return
        with suppress(OSError):
            self._path.unlink()
        with suppress(OSError):
            os.close(self._descriptor)
        self._descriptor = -1  # by then the number may be another file's


@contextmanager
def abandoned(path: Path) -> Iterator[bool]:
    """Whether what the lock at `path` belongs to is a leftover; if so, nobody else is told so meanwhile.

    It is if the lock is gone, if nobody holds it, or if it cannot be held and is a day old.

    Raises:
        OSError: the lock cannot be opened.
    """
    try:
        descriptor = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        yield True
        return
    try:
        yield _is_left(descriptor)
    finally:
        os.close(descriptor)


def _is_left(descriptor: int) -> bool:
    try:
        locked = _locked(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return locked or time.time() - os.fstat(descriptor).st_mtime > _LEFT_AFTER_SECONDS


def _locked(descriptor: int, operation: int) -> bool:
    """Lock an open file; `False` where the file system has no locks."""
    try:
        fcntl.flock(descriptor, operation)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
        return False
    return True
