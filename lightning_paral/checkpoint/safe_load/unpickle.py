"""Load files written by `torch.save` without running code from them: only harmless types are allowed."""

import io
import os
import pickle
import re
from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn

from lightning_paral.checkpoint.safe_load.allowed_globals import TorchRules, python_globals
from lightning_paral.checkpoint.safe_load.archive import Archive, Read, open_regular, read_archive
from lightning_paral.checkpoint.safe_load.opcodes import FREE_CONTAINERS, Made, PickleError, RefusedError, interpret
from lightning_paral.errors import CheckpointError

_NAMED = re.compile(r"GLOBAL (\S+)|class (\S+)")  # the global that torch names in its errors
_LOCK = RLock()  # torch has one set of allowed types per process
_MAX_DEPTH = 100
_EXPANSION = 64  # steps that a traversal may take per byte of the pickle
_CONTAINERS = (dict, list, tuple, Made)


def load_safely(
    file: Any, *, weights_only: bool = True, mmap: bool = False, name: object = None, extra: tuple[type, ...] = ()
) -> Any:
    """Load a file written by `torch.save`, with tensors on the host.

    Args:
        file: a path, a file open for reading, or the bytes of a file.
        weights_only: `False` trusts the file: objects of any type are created, and their code runs.
        mmap: whether to memory-map tensors instead of reading them; requires a path.
        name: the name of the file in error messages; `None` uses `file`.
        extra: additional types that are harmless.

    Raises:
        CheckpointError: the file is damaged, or contains a type that is not allowed.
    """
    name = name or file
    file = _BytesFile(file) if isinstance(file, memoryview) else file
    try:
        if not weights_only:
            return torch.load(file, map_location="cpu", weights_only=False, mmap=mmap or None)
        _check(file, name, extra)
        with _safe_globals(extra):
            return torch.load(file, map_location="cpu", weights_only=True, mmap=mmap or None)
    except RefusedError as error:
        raise CheckpointError(_refusal(name, error.name)) from error
    except PickleError as error:
        raise CheckpointError(f"{name} is damaged, or cannot be loaded safely: {error}.") from error
    except pickle.UnpicklingError as error:
        found = _NAMED.search(str(error))
        what = (found.group(1) or found.group(2)).strip("'>.,") if found else None
        if what is None:
            raise CheckpointError(f"{name} is damaged, or cannot be loaded safely: {error}") from error
        raise CheckpointError(_refusal(name, what)) from error
    except (CheckpointError, OSError):
        raise
    except (AttributeError, ImportError) as error:
        raise CheckpointError(f"{name} contains an object of a type that cannot be imported: {error}") from error
    except Exception as error:  # torch may raise any error for a damaged file
        raise CheckpointError(
            f"{name} is damaged, truncated or not a checkpoint: {type(error).__name__}: {error}"
        ) from error


def _refusal(name: object, what: str) -> str:
    return (
        f"{name} contains an object of type {what!r}. Creating it could run code, so the file was not loaded. If you "
        "trust the file, import the type and call "
        f"torch.serialization.add_safe_globals([{what.rsplit('.', 1)[-1]}]) before loading. To trust everything in it, "
        "use CheckpointOptions(weights_only=False), or pass weights_only=False to trainer.fit (validate, test, "
        "predict) or load_from_checkpoint, or --trust to the command `paral`."
    )


def _check(file: Any, name: object, extra: tuple[type, ...] = ()) -> None:
    """Check what loading a file written by `torch.save` would import and call, and how much memory it would take.

    Raises:
        PickleError: the file contains something that is not allowed, or would take too much memory for its size.
        CheckpointError: the file is damaged, or was not written by `torch.save`.
    """
    with _reading(file) as (read, nbytes):
        archive = read_archive(read, nbytes, name)
        top = _top(archive)
        if archive is None or f"{top}data.pkl" not in archive.records:
            raise CheckpointError(f"{name} is damaged or not a checkpoint: it is not a file written by torch.save.")
        record = archive.records[f"{top}data.pkl"]
        data = read(record.start, record.size)
    prefix = f"{top}data/"
    sizes = {key.removeprefix(prefix): r.size for key, r in archive.records.items() if key.startswith(prefix)}
    check_expansion(interpret(data, TorchRules(sizes, extra)), len(data))


def _top(archive: Archive | None) -> str:
    """Return the prefix of all record names in an archive. Like torch, take it from the first record."""
    return f"{next(iter(archive.records), '').split('/')[0]}/" if archive is not None else "/"


def _children(value: Any) -> Any:
    cls = type(value)
    if cls is dict:
        return value.values()
    if cls in (list, tuple):
        return value
    if cls is Made:
        return (*value.args, value.state, *value.items.values())
    return ()


def check_expansion(root: Any, nbytes: int) -> None:
    """Raise a `PickleError` if traversing `root` would not end, or would take too many steps for a pickle of `nbytes`.

    Code that traverses the tree visits an object that is referenced twice, and everything below it, twice. A small
    pickle of nested references can therefore take exponential time.
    """
    limit = _EXPANSION * nbytes + FREE_CONTAINERS
    steps: dict[int, tuple[int, int]] = {}  # number of steps and depth of each object traversed
    open_now: set[int] = set()
    path: list[tuple[Any, bool]] = [(root, False)]
    while path:
        value, done = path.pop()
        if type(value) not in _CONTAINERS:
            continue
        if done:
            found = [steps[id(child)] for child in _children(value) if type(child) in _CONTAINERS]
            count = 1 + len(_children(value)) + sum(number for number, _ in found)
            depth = 1 + max((depth for _, depth in found), default=0)
            if count > limit or depth > _MAX_DEPTH:
                raise PickleError("its pickle is nested too deeply, or repeats references too often")
            steps[id(value)] = (count, depth)
            open_now.discard(id(value))
        elif id(value) in open_now:
            raise PickleError("its pickle contains itself")
        elif id(value) not in steps:
            open_now.add(id(value))
            path.append((value, True))
            path.extend((child, False) for child in _children(value))


class _BytesFile(io.RawIOBase):
    """A file-like object over bytes in memory or in a mapped file, without copying them."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._position = 0

    def readinto(self, target: Any) -> int:
        part = self._data[self._position : self._position + len(target)]
        target[: len(part)] = part
        self._position += len(part)
        return len(part)

    def seek(self, offset: int, whence: int = 0) -> int:
        self._position = offset + (0, self._position, len(self._data))[whence]
        return self._position

    def tell(self) -> int:
        return self._position

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True


@contextmanager
def _reading(file: Any) -> Iterator[tuple[Read, int]]:
    """Yield a function that reads from `file`, and the size of `file`. Restore the position of an open file."""
    if isinstance(file, str | os.PathLike):
        descriptor = open_regular(os.fspath(file))
        try:
            yield lambda offset, size: os.pread(descriptor, size, offset), os.fstat(descriptor).st_size
        finally:
            os.close(descriptor)
        return

    def read(offset: int, size: int) -> bytes:
        file.seek(offset)
        return bytes(file.read(size))

    position = file.tell()
    try:
        yield read, file.seek(0, io.SEEK_END)
    finally:
        file.seek(position)


@contextmanager
def _safe_globals(extra: tuple[type, ...] = ()) -> Iterator[None]:
    """Allow the types of this package in `torch.load` inside the context, in addition to those of the user."""
    with _LOCK:
        before = set(torch.serialization.get_safe_globals())
        ours = [kind for kind in (*python_globals(), *extra) if kind not in before]
        with torch.serialization.safe_globals(ours):
            yield


def warn_about_refused_types(file: Any) -> None:
    """Warn if loading will refuse a file that `torch.save` has written.

    Args:
        file: a path, or a file open for reading.
    """
    with _safe_globals():
        refused = torch.serialization.get_unsafe_globals_in_checkpoint(file)
    if refused:
        rank_zero_warn(
            f"The checkpoint contains {', '.join(sorted(refused))}. Loading will refuse it, because creating objects "
            "of these types could run code. Save numbers, strings, tensors, arrays and containers of them instead, or "
            "allow the types with torch.serialization.add_safe_globals before loading."
        )
        return
    try:
        _check(file, "The checkpoint")
    except (PickleError, CheckpointError) as error:
        rank_zero_warn(
            f"Loading will refuse the checkpoint: {error}. Save numbers, strings, tensors, arrays and containers of "
            "them instead, or load it with CheckpointOptions(weights_only=False)."
        )
