"""Atomic commit of a file or folder: write next to the target, then rename over it."""

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
from lightning_paral.checkpoint.io.lock import Lock, lock_if_abandoned
from lightning_paral.checkpoint.ownership import check_replaceable, inspect_path

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_SAVE_NAME = re.compile(r"\.(?P<target>.+)\.(?P<role>saving|replaced|lock)-(?P<save>[0-9a-f]{16})", re.DOTALL)


class AtomicPath:
    """A new file or folder next to `target`, at `path`, which `commit` renames to `target`.

    A third file next to them stays locked while this process lives. The next save in the folder removes files of saves
    whose lock is free. `_new_save_id` makes names that files of users do not have.

    Args:
        target: path of the checkpoint. Missing parent folders are created.
        folder: whether to make a folder.

    Raises:
        CheckpointError: a save to `target` would delete files that are no checkpoint.
    """

    def __init__(self, target: Path, *, folder: bool) -> None:
        self.target = target
        self._is_folder = folder
        check_replaceable(target, folder=folder)
        target.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(target.parent)
        while True:
            save = _new_save_id(target)
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
        """Rename `path` to `target` in one step, then remove what was at `target`.

        Raises:
            CheckpointError: by now there are files at `target` that are no checkpoint and would be deleted.
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
        """Swap `path` and `target` by renames; between two of them, `resolve` finds the old checkpoint."""
        os.rename(self.target, self._replaced)
        try:
            os.rename(self.path, self.target)
        except BaseException:
            os.rename(self._replaced, self.target)
            raise
        os.rename(self._replaced, self.path)

    def discard(self) -> None:
        """Remove `path` and the lock; `target` is unchanged."""
        with suppress(OSError):  # NFS keeps open files: a later save removes them
            delete(self.path)
        self._lock.release()


def _new_save_id(target: Path) -> str:
    """Return a new id for the names of the files that a save puts next to `target`.

    Half of it is random, the other half a checksum of that and the name of the target. So a file of a user with a
    similar name is never taken for one of ours.
    """
    number = uuid.uuid4().hex[:8]
    return number + _proof(target.name, number)


def _proof(name: str, number: str) -> str:
    return f"{checksum(f'lightning_paral {number} {name}'.encode(errors='surrogateescape')):016x}"[:8]


def _match_save_names(names: list[str]) -> Iterator[re.Match[str]]:
    """Yield a match for each of `names` that a save has made."""
    for match in filter(None, map(_SAVE_NAME.fullmatch, names)):
        if match["save"][8:] == _proof(match["target"][::-1], match["save"][:8]):
            yield match


def _sibling(target: Path, role: str, save: str) -> Path:
    """Return the path of a file that a save puts next to `target`.

    The name of the target is reversed: Lightning searches names for `last` and `hpc_ckpt_`, and would take leftovers of
    a killed save for the newest checkpoint.
    """
    return target.parent / f".{target.name[::-1]}.{role}-{save}"


def resolve(target: Path) -> Path:
    """Return the path of the checkpoint `target`: another one if a save has moved it away and not replaced it yet."""
    for _ in range(3):  # it may come back meanwhile
        if os.path.lexists(target):
            break
        with suppress(FileNotFoundError):
            moved = _replaced_versions(target)
            if moved:
                return max(moved, key=lambda path: path.lstat().st_mtime)
    return target


def _replaced_versions(target: Path) -> list[Path]:
    with suppress(OSError):
        found = _match_save_names(os.listdir(target.parent))
        moved = [match[0] for match in found if match["target"][::-1] == target.name and match["role"] == "replaced"]
        return [target.parent / name for name in moved]
    return []


def remove_leftovers(folder: Path) -> None:
    """Remove files of dead saves in `folder`, and move back checkpoints that they moved away and did not replace."""
    found = _match_save_names(os.listdir(folder))
    for name, save in {(match["target"], match["save"]) for match in found}:
        target = folder / name[::-1]
        draft, replaced, lock = (_sibling(target, role, save) for role in ("saving", "replaced", "lock"))
        with suppress(OSError), lock_if_abandoned(lock) as is_left:
            if not is_left:
                continue
            if resolve(target) == replaced:
                os.rename(replaced, target)
            delete(draft)
            if os.path.lexists(replaced):
                os.rename(replaced, draft)  # half deleted, it must not be taken for a checkpoint
                delete(draft)
            delete(lock)


def remove(target: Path) -> None:
    """Remove the checkpoint `target` in one step, so that no process reads a part of it.

    Files that do not belong to a checkpoint stay, with a warning.
    """
    for path in (*_replaced_versions(target), target):
        if not os.path.lexists(path):
            continue
        found = inspect_path(path)
        if path.is_symlink() or found.is_file:
            path.unlink()
        elif not found.is_checkpoint and not found.is_empty:
            rank_zero_warn(f"{path} is {found.what}, not a checkpoint. It was not removed.")
        elif found.foreign:
            rank_zero_warn(f"{path} was removed except for files that do not belong to the checkpoint: {found.listed}.")
            for file in found.own:  # first the files that make it a checkpoint
                delete(path / file)
        else:
            _remove_at_once(target, path)


def _remove_at_once(target: Path, path: Path) -> None:
    save = _new_save_id(target)
    lock = Lock(_sibling(target, "lock", save))
    doomed = _sibling(target, "saving", save)
    try:
        os.rename(path, doomed)
        with suppress(OSError):
            delete(doomed)
    finally:
        lock.release()


def delete(path: Path) -> None:
    """Delete a file, a link or a folder with its content, if it exists."""
    with suppress(FileNotFoundError):  # another process may delete the same leftovers
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def exchange(first: Path, second: Path) -> bool:
    """Swap two paths in one step. Return `False` where this is not supported: outside Linux, and on NFS."""
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
