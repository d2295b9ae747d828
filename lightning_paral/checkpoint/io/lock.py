"""Lock files that distinguish saves in progress from leftovers of killed processes."""

import errno
import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

# NFS reports ESTALE for a file that was deleted.
_UNSUPPORTED = (errno.EINVAL, errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ESTALE)
_ABANDONED_AFTER_SECONDS = 24 * 3600


class Lock:
    """A new file that is locked until it is released or its process dies.

    On file systems that do not support locks, the age of the file decides instead, see `lock_if_abandoned`. NFS
    emulates the lock by a byte-range lock, for which the file must be open for writing:
    https://man7.org/linux/man-pages/man2/flock.2.html
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            _try_lock(self._descriptor, fcntl.LOCK_EX)
        except BaseException:
            self.release()
            raise

    @property
    def exists(self) -> bool:
        """Whether the file still exists. Another process may have removed it as a leftover before it was locked."""
        with suppress(OSError):
            return os.fstat(self._descriptor).st_nlink > 0 and self._path.exists()
        return False

    def release(self) -> None:
        """Remove the file. Further calls do nothing."""
        if self._descriptor < 0:
            return
        with suppress(OSError):
            self._path.unlink()
        with suppress(OSError):
            os.close(self._descriptor)
        self._descriptor = -1  # the system may reuse the number for another file


@contextmanager
def lock_if_abandoned(path: Path) -> Iterator[bool]:
    """Yield whether the save with the lock file `path` is abandoned; if so, hold the lock inside the context.

    A save is abandoned if its lock file does not exist, if no process holds the lock, or if the file system does not
    support locks and the file is more than a day old.

    Raises:
        OSError: the lock file cannot be opened.
    """
    try:
        descriptor = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        yield True
        return
    try:
        yield _is_abandoned(descriptor)
    finally:
        os.close(descriptor)


def _is_abandoned(descriptor: int) -> bool:
    """Lock an open lock file if no process holds the lock, and return whether its save is abandoned."""
    try:
        locked = _try_lock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return locked or time.time() - os.fstat(descriptor).st_mtime > _ABANDONED_AFTER_SECONDS


def _try_lock(descriptor: int, operation: int) -> bool:
    """Lock an open file. Return `False` if the file system does not support locks."""
    try:
        fcntl.flock(descriptor, operation)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
        return False
    return True
