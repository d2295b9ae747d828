"""Load files written by `torch.save` without running code from them: only harmless types are allowed."""

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from threading import RLock
from typing import Any

import numpy
import torch
from lightning.pytorch.utilities import rank_zero_warn

from lightning_paral.checkpoint.safe_load.allowed_globals import OWN_GLOBALS, TorchPickle
from lightning_paral.checkpoint.safe_load.archive import open_regular, read_archive
from lightning_paral.checkpoint.safe_load.pickles import PickleError, RefusedError, check_expansion
from lightning_paral.errors import CheckpointError

_LOCK = RLock()  # torch has one set of allowed types per process


def load_safely(file: Any, *, weights_only: bool = True, mmap: bool = False, name: object = None) -> Any:
    """Load a file written by `torch.save`, with tensors on the host.

    Args:
        file: a path, a file open for reading, which must begin at position 0, or the bytes of a file.
        weights_only: `False` trusts the file: objects of any type are created, and their code runs.
        mmap: whether to memory-map tensors instead of reading them; requires a path.
        name: the name of the file in error messages; `None` uses `file`.

    Raises:
        CheckpointError: the file is damaged, or contains a type that is not allowed.
    """
    name = name or file
    file = io.BytesIO(file) if isinstance(file, memoryview) else file
    try:
        if not weights_only:
            return torch.load(file, map_location="cpu", weights_only=False, mmap=mmap or None)
        _check(file, name)
        with _allowed():
            return torch.load(file, map_location="cpu", weights_only=True, mmap=mmap or None)
    except (CheckpointError, OSError):
        raise
    except RefusedError as error:
        raise CheckpointError(
            f"{name} contains an object of type {error.name!r}. Creating it could run code, so the file was not "
            "loaded. If you trust the file, import the type and call "
            f"torch.serialization.add_safe_globals([{error.name.rsplit('.', 1)[-1]}]) before loading. To trust "
            "everything in it, use CheckpointOptions(weights_only=False), or pass weights_only=False to trainer.fit "
            "(validate, test, predict) or load_from_checkpoint, or --trust to the command `paral`."
        ) from error
    except PickleError as error:
        raise CheckpointError(f"{name} is damaged, or cannot be loaded safely: {error}.") from error
    except Exception as error:  # torch may raise any error for a damaged file
        raise CheckpointError(
            f"{name} is damaged, not a checkpoint, or has a type that cannot be imported: "
            f"{type(error).__name__}: {error}"
        ) from error


@contextmanager
def _allowed() -> Iterator[None]:
    """Allow the types of this package in `torch.load`; those that the user has allowed stay so afterwards."""
    dtypes = [getattr(numpy.dtypes, name) for name in numpy.dtypes.__all__]  # which BUILD of a dtype looks up
    ours: set[Any] = {*dtypes, *((kind, name) for name, kind in OWN_GLOBALS.items())}
    check_sparse: Any = torch.sparse.check_sparse_tensor_invariants  # whose indices could be out of range
    with (
        _LOCK,
        torch.serialization.safe_globals([*ours.difference(torch.serialization.get_safe_globals())]),
        check_sparse(),
    ):
        yield


def _check(file: Any, name: object) -> None:
    """Check what loading a file written by `torch.save` would import and call, and how much memory it would take.

    Raises:
        PickleError: the file contains something that is not allowed, or would take too much memory for its size.
        CheckpointError: the file is damaged, or was not written by `torch.save`.
    """
    own = isinstance(file, str | os.PathLike)
    with open(open_regular(file), "rb") if own else nullcontext(file) as opened:

        def read(offset: int, size: int) -> bytes:
            opened.seek(offset)
            return bytes(opened.read(size))

        archive = read_archive(read, opened.seek(0, io.SEEK_END), name)
        records = {} if archive is None else archive.records
        top = next(iter(records), "").split("/")[0]  # which torch takes from the first record, too
        if f"{top}/data.pkl" not in records:
            raise CheckpointError(f"{name} is damaged or not a checkpoint: it is not a file written by torch.save.")
        record = records[f"{top}/data.pkl"]
        data = read(record.start, record.size)
        opened.seek(0)
    prefix = f"{top}/data/"
    sizes = {key.removeprefix(prefix): found.size for key, found in records.items() if key.startswith(prefix)}
    check_expansion(TorchPickle(data, sizes).read_all(), len(data))


def warn_about_refused_types(file: Any) -> None:
    """Warn if loading will refuse a file that `torch.save` has written.

    Args:
        file: a path, or a file open for reading.
    """
    try:
        _check(file, "The checkpoint")
    except (PickleError, CheckpointError) as error:
        found = f"The checkpoint contains {error.name}" if isinstance(error, RefusedError) else str(error)
        rank_zero_warn(
            f"Loading will refuse the checkpoint. {found}. Save numbers, strings, tensors, arrays and containers of "
            "them instead, allow the type with torch.serialization.add_safe_globals before loading, or load it with "
            "CheckpointOptions(weights_only=False)."
        )
