"""Load files written by `torch.save` without running code from them: only harmless types, calls and states are allowed.

`torch.load(weights_only=True)` checks only types. A file can still set the state of any object of an allowed type, even
of objects that the whole process shares, such as enum members and numpy dtypes, and can allocate storages of any size.
The rules here, for globals and for the arguments of calls and states, are applied to the pickle before torch reads it.
"""

import io
import os
import re
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from math import prod
from pathlib import PosixPath, PurePosixPath
from reprlib import repr as short
from threading import RLock
from typing import Any

import numpy
import torch
from torch.serialization import StorageType, get_safe_globals

from lightning_paral.checkpoint.archive import open_regular, read_archive
from lightning_paral.checkpoint.pickles import Made, Named, PickleError, PickleReader, RefusedError, check_expansion
from lightning_paral.errors import CheckpointError

# Protocol 2, which `torch.save` writes, has the names of Python 2 of what torch.load accepts.
_IMPORT_MAPPING = {"__builtin__": "builtins", "copy_reg": "copyreg", "exceptions": "builtins"}
"""Modules by their names in Python 2."""
_NAME_MAPPING = {("__builtin__", "xrange"): ("builtins", "range")}
"""Module and name by those in Python 2."""

_MAX_EXPANDED = 2**28
_MAX_DIMENSIONS = 64
_PLAIN = (str, bytes, int, float, bool, type(None))


def _name(kind: Any) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


_TIMES = {_name(kind): kind for kind in (date, datetime, time, timedelta, timezone)}
# `pathlib._local` is where Python 3.13 defines paths, and `numpy._core` where numpy 2 defines its functions.
_PATHS = {f"{of}.{kind.__name__}": kind for of in ("pathlib", "pathlib._local") for kind in (PosixPath, PurePosixPath)}
_MAKERS = {"_reconstruct": numpy.empty(0).__reduce__()[0], "scalar": numpy.float64().__reduce__()[0]}
_OF_NUMPY = {f"numpy.{of}.multiarray.{name}": make for of in ("core", "_core") for name, make in _MAKERS.items()}
_OTHERS = (bytes, frozenset, range, slice, Decimal, Namespace, numpy.ndarray, numpy.dtype)
OWN_GLOBALS: dict[str, Any] = {**_TIMES, **_PATHS, **_OF_NUMPY, **{_name(kind): kind for kind in _OTHERS}}
"""The types and functions to allow by name in addition to those of torch."""


class TorchPickle(PickleReader):
    """Reads the pickle in a file written by `torch.save`.

    Args:
        data: the pickle.
        sizes: the size in bytes of each storage in the file, by key.
    """

    def __init__(self, data: bytes, sizes: Mapping[str, int]) -> None:
        super().__init__(data)
        self._sizes = sizes
        self._trusted = {found[1] if isinstance(found, tuple) else _name(found) for found in get_safe_globals()}
        # It does not check that the parts of a tensor are consistent, so it could read memory of other objects.
        self._trusted.discard("torch.nested._internal.nested_tensor._rebuild_njt")

    def find_class(self, module: str, name: str) -> Named:
        """Return a stand-in for a global. Raise a `RefusedError` if it is not allowed."""
        module, name = _NAME_MAPPING.get((module, name), (_IMPORT_MAPPING.get(module, module), name))  # Python 2 names
        full = f"{module}.{name}"
        if full not in _CALLS and full not in _CONSTANTS and full not in self._trusted and _item_bytes(full) is None:
            raise RefusedError(full)
        return Named(full)

    def call(self, name: str, args: tuple[Any, ...]) -> Any:
        """Return a stand-in for the result of a call. Raise a `PickleError` if the call is not allowed."""
        check = _CALLS.get(name, _anything if name in self._trusted else None)
        fits = False
        with suppress(TypeError):  # too few or too many arguments
            fits = check is not None and check(*args)
        if not fits:
            raise PickleError(f"it calls {name} with {short(args)}, which torch.save does not")
        if check is _tensor_of_type:
            if args[1].name not in _TENSORS and args[1].name not in self._trusted:
                raise RefusedError(args[1].name)
            self.call(args[0].name, args[2])
        elif check is _items:
            self.check_keys(args[0] if args else ())
        if check is _encoded:
            return args[0].encode("latin1")
        if name == "builtins.bytes":
            return b""
        return Made(name, () if check is _tensor else args)

    def may_be_key(self, made: Made) -> bool:
        """Return whether the result of a call may be a key: whether it is a plain value."""
        return made.by in _KEYS or made.by.endswith(".scalar")

    def check_state(self, target: Made, state: Any) -> None:
        """Raise a `PickleError` for a state that `torch.save` does not write."""
        if target.by == "numpy.dtype":
            # With another state, numpy would read memory as objects, or read beyond the end of an element.
            if state not in [numpy.dtype(target.args[0]).newbyteorder(order).__reduce__()[2] for order in "<>"]:
                raise PickleError(f"it sets the state of a numpy.dtype to {short(state)}, which numpy does not write")
        elif target.by.endswith("._reconstruct"):
            _check_array(*state)
        elif target.by in ("argparse.Namespace", "collections.OrderedDict"):
            _check_attributes(state)
        elif target.by not in self._trusted:
            raise PickleError(f"it sets the state of {target.by}, which has no state")

    def persistent_load(self, identity: Any) -> Made:
        """Return a stand-in for a storage. Raise a `PickleError` if the file does not contain all of its bytes."""
        _, kind, key, location, numel = identity
        itemsize = _item_bytes(kind.name)
        fits = type(numel) is int and type(location) is str
        if itemsize is None or not fits or not 0 <= numel * itemsize <= self._sizes.get(key, -1):
            raise PickleError(f"its storage {short(key)} of {short(numel)} elements is not in the file")
        return Made("storage", (numel * itemsize,))


def _item_bytes(name: str) -> int | None:
    """Return the size of an element of a storage in bytes; `None` if `name` is not a type of storages."""
    if name == "torch.storage.UntypedStorage":
        return 1
    storage_type: Any = StorageType
    with suppress(KeyError):
        return int(storage_type(name.removeprefix("torch.")).dtype.itemsize) if name.endswith("Storage") else None
    return None


# Arguments of calls: each function returns whether they fit


def _anything(*_: Any) -> bool:
    return True


def _nothing(*args: Any) -> bool:
    return not args


def _values(*args: Any) -> bool:
    return all(type(arg) in _PLAIN or (type(arg) is Made and arg.by in _VALUES) for arg in args)


def _texts(*args: Any) -> bool:
    return all(type(arg) in (str, bytes) for arg in args)  # a number would be a size


def _encoded(text: Any, encoding: Any) -> bool:
    return type(text) is str and encoding == "latin1"


def _items(*args: Any) -> bool:
    return len(args) <= 1 and all(type(arg) in (list, tuple) for arg in args)


def _counts(*args: Any) -> bool:
    return len(args) <= 1 and all(type(arg) is dict for arg in args)


def _sizes(*shapes: Any) -> bool:
    numbers = [number for shape in shapes for number in shape]
    fits = all(type(shape) in (tuple, list) and len(shape) <= _MAX_DIMENSIONS for shape in shapes)
    return fits and all(type(number) is int and 0 <= number < 2**63 for number in numbers)


def _tensor(stored: Any, _: Any, size: Any, stride: Any, *more: Any) -> bool:
    """Check a tensor in a storage. torch itself checks that the view is inside the storage."""
    fits = type(stored) is Made and stored.by == "storage" and _sizes(size, stride) and all(map(_no_hooks, more))
    if fits and prod(size) > max(stored.args[0], _MAX_EXPANDED):
        raise PickleError(f"it has a tensor of shape {short(size)} in {stored.args[0]} bytes")
    return fits


def _no_hooks(arg: Any) -> bool:
    if type(arg) is Made and arg.by == "collections.OrderedDict":
        arg.by = "the hooks of a tensor"  # to which the rest of the pickle cannot add any
        return not arg.items
    return True


def _parameter(data: Any, _: Any, hooks: Any, state: Any = None) -> bool:
    for part in state if type(state) is tuple else (state,):
        if part is not None:
            _check_attributes(part)
    return type(data) is Made and _no_hooks(hooks)


def _tensor_of_type(make: Any, kind: Any, args: Any, state: Any) -> bool:
    named = type(make) is Named and type(kind) is Named and type(args) is tuple
    return named and make.name.startswith(_REBUILD) and _parameter(Made("", ()), None, None, state)


def _check_attributes(state: Any) -> None:
    if type(state) is not dict or not all(type(key) is str and not key.startswith("__") for key in state):
        raise PickleError(f"it sets the state of an object to {short(state)}, which is not a dict of attributes")


# numpy


def _dtype(code: Any, is_aligned: Any, is_copied: Any) -> bool:
    # Without a copy, it would be the dtype object that the whole process shares.
    fits = type(code) is str and is_aligned is False and is_copied is True
    if fits and not re.fullmatch(r"[biufcSU]\d{1,9}", code):
        raise PickleError(
            f"it has a numpy array of the dtype {short(code)}, which is not supported. Save it as arrays of numbers or "
            "strings, or as lists"
        )
    return fits


def _code(dtype: Any) -> str:
    if type(dtype) is not Made or dtype.by != "numpy.dtype":
        raise PickleError("it has an array or a number without a dtype")
    return str(dtype.args[0])


def _empty_array(kind: Any, shape: Any, code: Any) -> bool:
    return (kind, shape) == (Named("numpy.ndarray"), (0,)) and code in (b"b", "b")


def _check_array(_: Any, shape: Any, dtype: Any, is_fortran: Any, values: Any) -> None:
    """Raise a `PickleError` if the data of an array do not match its shape and dtype."""
    fits = type(values) is bytes and _sizes(shape)
    if not fits or len(values) != prod(shape) * numpy.dtype(_code(dtype)).itemsize:
        raise PickleError("it has an array whose data does not match its shape and dtype")


def _scalar(dtype: Any, data: Any) -> bool:
    return type(data) is bytes and len(data) == numpy.dtype(_code(dtype)).itemsize


_TENSORS = ("torch.Tensor", "torch.nn.parameter.Parameter")
_KINDS = (torch.dtype, torch.layout, torch.qscheme, torch.memory_format)
_CONSTANTS = {f"torch.{name}" for name, value in vars(torch).items() if isinstance(value, _KINDS)}
_CONSTANTS |= {*_TENSORS, "numpy.ndarray"}
_NUMBERS = ("builtins.complex", "builtins.range", "builtins.slice", "decimal.Decimal")
_KEYS = {"torch.device", *_PATHS, *_TIMES}
_VALUES = {"torch.serialization._get_layout", *_NUMBERS, *_KEYS}
_REBUILD = "torch._utils._rebuild_"
_CALLS: dict[str, Callable[..., bool]] = {
    **dict.fromkeys(_VALUES, _values),
    **dict.fromkeys(("builtins.set", "builtins.frozenset"), _items),
    # `bytes` only makes empty ones; others are pickled as `_codecs.encode`. A mesh with arguments would access groups.
    **dict.fromkeys(("builtins.bytes", "collections.OrderedDict", "argparse.Namespace"), _nothing),
    **dict.fromkeys(("torch.nn.parameter.Parameter", "torch.distributed.device_mesh.DeviceMesh"), _nothing),
    "_codecs.encode": _encoded,
    "builtins.bytearray": _texts,
    "collections.Counter": _counts,
    "torch.Size": _sizes,
    "torch._tensor._rebuild_from_type_v2": _tensor_of_type,
    **{f"{_REBUILD}{name}": _tensor for name in ("tensor", "tensor_v2", "tensor_v3")},
    **{f"{_REBUILD}{name}": _parameter for name in ("parameter", "parameter_with_state")},
    **{f"{_REBUILD}{name}": _anything for name in ("sparse_tensor", "meta_tensor_no_storage", "wrapper_subclass")},
    "numpy.dtype": _dtype,
    **{name: _scalar if name.endswith(".scalar") else _empty_array for name in _OF_NUMPY},
}


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
