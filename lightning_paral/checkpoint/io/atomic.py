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
# `target` is the reversed name of the target, see `_sibling`.
_SAVE_NAME = re.compile(r"\.(?P<target>.+)\.(?P<role>saving|replaced|lock)-(?P<save>[0-9a-f]{16})", re.DOTALL)


class AtomicPath:
    """A new file or folder `path` next to `target`. `commit` renames it to `target`.

    A lock file next to them stays locked until the save ends or this process dies. The next save in the folder removes
    the files of saves whose lock is free. Their names contain a checksum, see `_new_save_id`, so files of the user are
    never removed.

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
        while True:
            save = _new_save_id(target)
            self._lock = Lock(_sibling(target, "lock", save))
            if self._lock.exists:
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
        """Rename `path` to `target` in one step, then remove the old checkpoint.

        Raises:
            CheckpointError: files that do not belong to a checkpoint were created at `target` meanwhile, and would be
                deleted.
        """
        check_replaceable(self.target, folder=self._is_folder)
        if self.path.is_dir():
            _sync_folder(self.path)
        is_folder = self.target.is_dir() and not self.target.is_symlink()
        # A rename cannot replace a folder that has files, nor a file by a folder.
        if not is_folder and not (self.path.is_dir() and os.path.lexists(self.target)):
            os.replace(self.path, self.target)
        elif not exchange(self.path, self.target):
            self._replace_in_steps()
        _sync_folder(self.target.parent)
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
        """Remove `path` and the lock; `target` is unchanged."""
        with suppress(OSError):  # NFS keeps files that are still open; a later save removes them
            delete(self.path)
        self._lock.release()


def _new_save_id(target: Path) -> str:
    """Return a new id for the names of the files that a save creates next to `target`: 16 hexadecimal digits.

    The first 8 are random. The last 8 are a checksum of them and the name of the target, so that a user's file with a
    similar name is not mistaken for a file of a save.
    """
    number = uuid.uuid4().hex[:8]
    return number + _check_digits(target.name, number)


def _check_digits(name: str, number: str) -> str:
    return f"{checksum(f'lightning_paral {number} {name}'.encode(errors='surrogateescape')):016x}"[:8]


def _match_save_names(names: list[str]) -> Iterator[re.Match[str]]:
    """Yield a match for each of `names` that was created by a save."""
    for match in filter(None, map(_SAVE_NAME.fullmatch, names)):
        if match["save"][8:] == _check_digits(match["target"][::-1], match["save"][:8]):
            yield match


def _sibling(target: Path, role: str, save: str) -> Path:
    """Return the path of a file that a save creates next to `target`.

    It contains the name of the target in reverse. Otherwise Lightning, which searches file names for `last` and
    `hpc_ckpt_`, would mistake the leftovers of a killed save for the newest checkpoint.
    """
    return target.parent / f".{target.name[::-1]}.{role}-{save}"


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
        found = _match_save_names(os.listdir(target.parent))
        moved = [match[0] for match in found if match["target"][::-1] == target.name and match["role"] == "replaced"]
        return [target.parent / name for name in moved]
    return []


def remove_leftovers(folder: Path) -> None:
    """Remove the files of killed saves in `folder`.

    If a killed save had renamed a checkpoint and not replaced it, the checkpoint gets its name back.
    """
    found = _match_save_names(os.listdir(folder))
    for name, save in {(match["target"], match["save"]) for match in found}:
        target = folder / name[::-1]
        draft, replaced, lock = (_sibling(target, role, save) for role in ("saving", "replaced", "lock"))
        with suppress(OSError), lock_if_abandoned(lock) as is_abandoned:
            if not is_abandoned:
                continue
            if resolve(target) == replaced:
                os.rename(replaced, target)
            delete(draft)
            if os.path.lexists(replaced):
                os.rename(replaced, draft)  # if this process dies while deleting it, it must not look like a checkpoint
                delete(draft)
            delete(lock)


def remove(target: Path) -> None:
    """Remove the checkpoint `target` in one step, so that no process reads a part of it.

    A file is removed whatever it contains. Files in a folder that do not belong to a checkpoint are kept, with a
    warning.
    """
    for path in (*_replaced_versions(target), target):
        if not os.path.lexists(path):
            continue
        found = inspect_path(path)
        if path.is_symlink() or found.is_file:
            path.unlink()
        elif not found.is_checkpoint and not found.is_empty:
            rank_zero_warn(f"{path} is {found.what}, not a checkpoint, and was not removed.")
        elif found.foreign:
            rank_zero_warn(f"{path} was removed except for files that do not belong to the checkpoint: {found.listed}.")
            for file in found.own:  # the files that identify the folder as a checkpoint come first
                delete(path / file)
        else:
            _remove_at_once(target, path)


def _remove_at_once(target: Path, path: Path) -> None:
    """Rename `path` to a name that is not a checkpoint, then delete it."""
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
    """Delete a file, a link, or a folder and its contents. Do nothing if it does not exist."""
    with suppress(FileNotFoundError):  # another process may be deleting the same leftovers
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


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


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
