"""From nothing, or an old checkpoint, to a new one in one step: a rename of what was written beside it."""

import ctypes
import errno
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from lightning.pytorch.utilities import rank_zero_warn

from lightning_paral.checkpoint.io.files import checksum
from lightning_paral.checkpoint.io.lock import Lock, abandoned
from lightning_paral.checkpoint.ownership import check_replaceable, found_in

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_BESIDE = re.compile(r"\.(?P<target>.+)\.(?P<role>saving|replaced|lock)-(?P<save>[0-9a-f]{16})", re.DOTALL)


class AtomicPath:
    """A file or folder beside `target`, which takes its place when it is complete.

    A file beside both is locked while the process that made them lives. Drafts without such a lock are leftovers, and
    the next save in the folder removes them. Their names prove that they are ours, see `_id_of_save`.

    Raises:
        CheckpointError: what is at `target` is no checkpoint, and would be lost.
    """

    def __init__(self, target: Path, *, folder: bool) -> None:
        self.target = target
        self._is_folder = folder
        check_replaceable(target, folder=folder)
        target.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(target.parent)
        while True:
            save = _id_of_save(target)
            self._lock = Lock(_sibling(target, "lock", save))
            if self._lock.is_kept:
                break
            self._lock.release()
        self.path = _sibling(target, "saving", save)
        self._replaced = _sibling(target, "replaced", save)
        try:
            if folder:
                self.path.mkdir()
            else:
                self.path.touch(exist_ok=False)
        except BaseException:
            self._lock.release()
            raise

    def __enter__(self) -> "AtomicPath":
        return self

    def __exit__(self, *_: object) -> None:
        self.discard()

    def commit(self) -> None:
        """Put the draft in the place of the target, at once, and remove what was there.

        Raises:
            CheckpointError: what is at the target by now is no checkpoint, and would be lost.
        """
        check_replaceable(self.target, folder=self._is_folder)
        if self.path.is_dir():
            _sync_folder(self.path)
        is_folder = self.target.is_dir() and not self.target.is_symlink()
        if not is_folder and not (self.path.is_dir() and os.path.lexists(self.target)):
            os.replace(self.path, self.target)
        elif not exchange(self.path, self.target):
            self._replace_in_steps()
        _sync_folder(self.target.parent)
        self.discard()

    def _replace_in_steps(self) -> None:
        """Swap draft and target where the system cannot: between two renames `resolve` finds the old one beside."""
        os.rename(self.target, self._replaced)
        try:
            os.rename(self.path, self.target)
        except BaseException:
            os.rename(self._replaced, self.target)
            raise
        os.rename(self._replaced, self.path)

    def discard(self) -> None:
        """Remove what is at the draft's path; the target stays as it is."""
        with suppress(OSError):  # NFS keeps files that are open: then it is a leftover
            delete(self.path)
        self._lock.release()


def _id_of_save(target: Path) -> str:
    """Return a new number of a save, for the names of what it puts beside `target`.

    Half of it is random, half the checksum of that and the target's name: what is beside a checkpoint under such a name
    is ours, and no file of a user's that is called much the same.
    """
    number = uuid.uuid4().hex[:8]
    return number + _proof(target.name, number)


def _proof(name: str, number: str) -> str:
    return f"{checksum(f'lightning_paral {number} {name}'.encode(errors='surrogateescape')):016x}"[:8]


def _of_saves(names: list[str]) -> Iterator[re.Match[str]]:
    """Return the names that saves have made, matched."""
    for match in filter(None, map(_BESIDE.fullmatch, names)):
        if match["save"][8:] == _proof(match["target"][::-1], match["save"][:8]):
            yield match


def _sibling(target: Path, role: str, save: str) -> Path:
    """Return a path in the folder of `target` that is no checkpoint's, nor looks like one.

    The name is written backwards, for Lightning looks for `last` and `hpc_ckpt_` within names, and would take what a
    killed save has left for the newest checkpoint.
    """
    return target.parent / f".{target.name[::-1]}.{role}-{save}"


def resolve(target: Path) -> Path:
    """Return where the checkpoint `target` is: beside, if one that was to replace it did not get there (yet)."""
    for _ in range(3):  # while it is looked for beside, it may come back
        if os.path.lexists(target):
            break
        with suppress(FileNotFoundError):
            moved = _replaced_versions(target)
            if moved:
                return max(moved, key=lambda path: path.lstat().st_mtime)
    return target


def _replaced_versions(target: Path) -> list[Path]:
    with suppress(OSError):
        found = _of_saves(os.listdir(target.parent))
        moved = [match[0] for match in found if match["target"][::-1] == target.name and match["role"] == "replaced"]
        return [target.parent / name for name in moved]
    return []


def remove_leftovers(folder: Path) -> None:
    """Remove what processes that died have left in `folder`, and put back what they moved away and did not replace."""
    found = _of_saves(os.listdir(folder))
    for name, save in {(match["target"], match["save"]) for match in found}:
        target = folder / name[::-1]
        draft, replaced, lock = (_sibling(target, role, save) for role in ("saving", "replaced", "lock"))
        with suppress(OSError), abandoned(lock) as is_left:
            if not is_left:
                continue
            if resolve(target) == replaced:
                os.rename(replaced, target)
            delete(draft)
            if os.path.lexists(replaced):
                os.rename(replaced, draft)  # what is half deleted must not be taken for what was moved away
                delete(draft)
            delete(lock)


def remove(target: Path) -> None:
    """Remove a checkpoint: it is gone at once, so that nobody meets a part of it.

    What is not a checkpoint's stays, and a warning says so.
    """
    for path in (*_replaced_versions(target), target):
        if not os.path.lexists(path):
            continue
        found = found_in(path)
        if path.is_symlink() or found.is_file:
            path.unlink()
        elif not found.is_checkpoint and not found.is_empty:
            rank_zero_warn(f"{path} is {found.what}, not a checkpoint. It was not removed.")
        elif found.foreign:
            rank_zero_warn(f"{path} was removed but for what is not the checkpoint's: {found.listed}.")
            for file in found.own:  # first what makes it a checkpoint
                delete(path / file)
        else:
            _remove_at_once(target, path)


def _remove_at_once(target: Path, path: Path) -> None:
    save = _id_of_save(target)
    lock = Lock(_sibling(target, "lock", save))
    doomed = _sibling(target, "saving", save)
    try:
        os.rename(path, doomed)
        with suppress(OSError):
            delete(doomed)
    finally:
        lock.release()


def delete(path: Path) -> None:
    """Delete a file, a link or a folder with all in it, if it is there."""
    with suppress(FileNotFoundError):  # of leftovers, another process may be deleting the same
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def exchange(first: Path, second: Path) -> bool:
    """Swap two paths in one step; `False` where the system cannot: outside of Linux, on NFS and others."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "renameat2"):
        return False
    if libc.renameat2(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number not in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
        raise OSError(number, os.strerror(number), str(second))
    return False


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
