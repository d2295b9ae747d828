"""Loading without running code from the file: only types that are known to be harmless are made."""

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

from lightning_paral.checkpoint.safe_load.allowed_globals import TorchRules, of_python
from lightning_paral.checkpoint.safe_load.archive import Archive, Read, open_regular, read_archive
from lightning_paral.checkpoint.safe_load.expansion import check_expansion
from lightning_paral.checkpoint.safe_load.opcodes import PickleError, RefusedError, interpret
from lightning_paral.errors import CheckpointError

_NAMED = re.compile(r"GLOBAL (\S+)|class (\S+)")
_LOCK = RLock()  # what torch admits is one set for the process


def load_safely(
    file: Any, *, weights_only: bool = True, mmap: bool = False, name: object = None, extra: tuple[type, ...] = ()
) -> Any:
    """Return what `torch.save` wrote, tensors on the host.

    Args:
        file: a path or a file open for reading.
        weights_only: `False` is what a user says who trusts the file: any type is made then, and its code runs.
        mmap: map tensors instead of reading them; needs a path.
        name: what errors call the file.
        extra: further types that are harmless.

    Raises:
        CheckpointError: the file holds a type that is not admitted, or is damaged.
    """
    name = name or file
    try:
        if not weights_only:
            return torch.load(file, map_location="cpu", weights_only=False, mmap=mmap or None)
        _check(file, name, extra)
        with _admitting(extra):
            return torch.load(file, map_location="cpu", weights_only=True, mmap=mmap or None)
    except RefusedError as error:
        raise CheckpointError(_refusal(name, error.name)) from error
    except PickleError as error:
        raise CheckpointError(f"{name} is damaged, or holds what cannot be loaded safely: {error}.") from error
    except pickle.UnpicklingError as error:
        found = _NAMED.search(str(error))
        what = (found.group(1) or found.group(2)).strip("'>.,") if found else None
        if what is None:
            raise CheckpointError(f"{name} is damaged, or holds what cannot be loaded safely: {error}") from error
        raise CheckpointError(_refusal(name, what)) from error
    except (CheckpointError, OSError):
        raise
    except (AttributeError, ImportError) as error:
        raise CheckpointError(f"{name} holds an object of a type that cannot be imported here: {error}") from error
    except Exception as error:  # torch's readers raise what they come upon
        raise CheckpointError(
            f"{name} is damaged or truncated, or no checkpoint: {type(error).__name__}: {error}"
        ) from error


def _refusal(name: object, what: str) -> str:
    return (
        f"{name} holds an object of {what!r}. Making it would run code, so it was not loaded. If you trust the "
        f"file, import that type and say torch.serialization.add_safe_globals([{what.rsplit('.', 1)[-1]}]) before. "
        "To trust everything in it, use CheckpointOptions(weights_only=False), or give weights_only=False to "
        "trainer.fit (validate, test, predict) or load_from_checkpoint, or --trust to the command `paral`."
    )


def _check(file: Any, name: object, extra: tuple[type, ...] = ()) -> None:
    """Raise if a file of `torch.save` asks for what is not admitted, or costs more than its size.

    Raises:
        PickleError: what it asks for.
        CheckpointError: it is damaged, or no file of `torch.save`.
    """
    with _reading(file) as (read, nbytes):
        archive = read_archive(read, nbytes, name)
        top = _top(archive)
        if archive is None or f"{top}data.pkl" not in archive.records:
            raise CheckpointError(f"{name} is damaged, or no checkpoint: it is not what torch.save writes.")
        record = archive.records[f"{top}data.pkl"]
        data = read(record.start, record.size)
    prefix = f"{top}data/"
    sizes = {key.removeprefix(prefix): r.size for key, r in archive.records.items() if key.startswith(prefix)}
    check_expansion(interpret(data, TorchRules(sizes, extra)), len(data))


def _top(archive: Archive | None) -> str:
    """Return the folder in which an archive has its records, which torch takes from the first of them."""
    return f"{next(iter(archive.records), '').split('/')[0]}/" if archive is not None else "/"


@contextmanager
def _reading(file: Any) -> Iterator[tuple[Read, int]]:
    """Give a reader of `file`, a path or a file open for reading, which is where it was afterwards, and its size."""
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
def _admitting(extra: tuple[type, ...] = ()) -> Iterator[None]:
    """Admit our types, and take none from a user who has admitted them before."""
    with _LOCK:
        before = set(torch.serialization.get_safe_globals())
        ours = [kind for kind in (*of_python(), *extra) if kind not in before]
        with torch.serialization.safe_globals(ours):
            yield


def warn_of_refused(file: Any) -> None:
    """Warn if loading will refuse what `torch.save` has written to `file`, a path or a file open for reading."""
    with _admitting():
        refused = torch.serialization.get_unsafe_globals_in_checkpoint(file)
    if refused:
        rank_zero_warn(
            f"The checkpoint holds {', '.join(sorted(refused))}, and loading makes no objects of types that could run "
            "code. Save numbers, strings, tensors, arrays and containers of them instead, or allow the types by "
            "torch.serialization.add_safe_globals before loading."
        )
        return
    try:
        _check(file, "The checkpoint")
    except (PickleError, CheckpointError) as error:
        rank_zero_warn(
            f"Loading will refuse the checkpoint: {error}. Save numbers, strings, tensors, arrays and containers of "
            "them instead, or load it with CheckpointOptions(weights_only=False)."
        )
