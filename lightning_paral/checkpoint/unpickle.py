"""Loading without running code from the file: only types that are known to be harmless are made."""

import pickle
import re
from argparse import Namespace
from contextlib import AbstractContextManager
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from pathlib import PosixPath, PurePosixPath
from typing import Any, BinaryIO

import numpy
import torch
from lightning.fabric.utilities.data import AttributeDict
from lightning.pytorch.trainer.states import RunningStage, TrainerFn, TrainerStatus
from lightning.pytorch.utilities import rank_zero_warn
from torch.distributed.checkpoint import filesystem, metadata

from lightning_paral.errors import CheckpointError

_OF_LIGHTNING = [AttributeDict, RunningStage, TrainerFn, TrainerStatus]
_OF_PYTHON = [
    *(frozenset, range, slice, Decimal, Namespace, PosixPath, PurePosixPath),
    *(date, datetime, time, timedelta, timezone),
]
_NUMPY_MAKES = {"_reconstruct": numpy.empty(0).__reduce__()[0], "scalar": numpy.float64().__reduce__()[0]}
_OF_NUMPY = [
    *(numpy.ndarray, numpy.dtype, *(getattr(numpy.dtypes, name) for name in numpy.dtypes.__all__)),
    *((make, f"numpy.core.multiarray.{name}") for name, make in _NUMPY_MAKES.items()),
    *((make, f"numpy._core.multiarray.{name}") for name, make in _NUMPY_MAKES.items()),
]
_NAMED = re.compile(r"GLOBAL (\S+)|class (\S+)")


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
        with _admitting(extra):
            return torch.load(file, map_location="cpu", weights_only=weights_only, mmap=mmap or None)
    except pickle.UnpicklingError as error:
        found = _NAMED.search(str(error))
        what = (found.group(1) or found.group(2)).strip("'>.,") if found else None
        if what is None:
            raise CheckpointError(f"{name} is damaged, or holds what cannot be loaded safely: {error}") from error
        raise CheckpointError(
            f"{name} holds an object of {what!r}. Making it would run code, so it was not loaded. If you trust the "
            f"file, import that type and say torch.serialization.add_safe_globals([{what.rsplit('.', 1)[-1]}]) before; "
            "CheckpointOptions(weights_only=False), in the command `paral` --trust, trusts everything in it."
        ) from error
    except (AttributeError, ImportError) as error:
        raise CheckpointError(f"{name} holds an object of a type that cannot be imported here: {error}") from error
    except (RuntimeError, EOFError, ValueError, KeyError) as error:
        raise CheckpointError(f"{name} is damaged or truncated, or no checkpoint: {error}") from error


def _admitting(extra: tuple[type, ...] = ()) -> AbstractContextManager[None]:
    return torch.serialization.safe_globals([*_OF_LIGHTNING, *_OF_PYTHON, *_OF_NUMPY, *extra])


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


_OF_DISTRIBUTED_CHECKPOINT = {
    (kind.__module__, kind.__qualname__): kind
    for kind in (
        metadata.Metadata,
        metadata.MetadataIndex,
        metadata.TensorStorageMetadata,
        metadata.BytesStorageMetadata,
        metadata.ChunkStorageMetadata,
        metadata.TensorProperties,
        metadata.StorageMeta,
        metadata._MEM_FORMAT_ENCODING,
        filesystem._StorageInfo,
        torch.Size,
        PosixPath,
    )
} | {("torch.serialization", "_get_layout"): torch.serialization._get_layout}
_DTYPES = {str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)}


class _MetadataUnpickler(pickle.Unpickler):
    """Makes the classes of a Distributed Checkpoint's metadata, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in _DTYPES:
            return _DTYPES[name]
        found = _OF_DISTRIBUTED_CHECKPOINT.get((module, name))
        if found is None:
            raise pickle.UnpicklingError(f"{module}.{name}")
        return found


def load_metadata(file: BinaryIO, name: object) -> metadata.Metadata:
    """Return the metadata of a Distributed Checkpoint from its file `.metadata`, without running code from it.

    Raises:
        CheckpointError: it holds anything but metadata, or is damaged.
    """
    try:
        loaded = _MetadataUnpickler(file).load()
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{name} asks for {error}, which has no place in a checkpoint's metadata. It was not loaded: the file is "
            "damaged or hostile."
        ) from error
    except Exception as error:
        raise CheckpointError(f"{name} is damaged: {error}") from error
    if not isinstance(loaded, metadata.Metadata):
        raise CheckpointError(f"{name} is not the metadata of a Distributed Checkpoint.")
    return loaded
