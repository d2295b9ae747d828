"""The rules for the globals, calls and states that a file written by `torch.save` may contain.

`torch.load(weights_only=True)` checks only types. A file can still set the state of any object of an allowed type, even
of objects that the whole process shares, such as enum members and numpy dtypes, and can allocate storages of any size.
The rules in this module also check the arguments of each call and the structure of each state. They are applied to the
pickle before torch reads it.
"""

from argparse import Namespace
from collections.abc import Callable, Mapping
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum
from math import prod
from pathlib import PosixPath, PurePosixPath
from typing import Any

import numpy
import torch
from lightning.pytorch.trainer.states import RunningStage, TrainerFn, TrainerStatus
from torch.serialization import get_safe_globals

from lightning_paral.checkpoint.safe_load.numpy_arrays import check_array, check_dtype, item_bytes
from lightning_paral.checkpoint.safe_load.opcodes import Made, Named, PickleError, RefusedError, check_key
from lightning_paral.compat.torch.files import IMPORT_MAPPING, NAME_MAPPING

_ENUMS = (RunningStage, TrainerFn, TrainerStatus)
_MAX_EXPANDED_BYTES = 2**28
_PLAIN = (str, bytes, int, float, bool, type(None))

_ITEM_BYTES = {
    "DoubleStorage": 8, "FloatStorage": 4, "HalfStorage": 2, "BFloat16Storage": 2, "LongStorage": 8,
    "IntStorage": 4, "ShortStorage": 2, "CharStorage": 1, "ByteStorage": 1, "BoolStorage": 1,
    "ComplexDoubleStorage": 16, "ComplexFloatStorage": 8, "QInt8Storage": 1, "QUInt8Storage": 1,
    "QInt32Storage": 4, "QUInt4x2Storage": 1, "QUInt2x4Storage": 1,
}  # fmt: skip
_STORAGES = {f"torch.{name}": size for name, size in _ITEM_BYTES.items()} | {"torch.storage.UntypedStorage": 1}
_CONSTANTS = {
    f"torch.{name}"
    for name, value in vars(torch).items()
    if isinstance(value, torch.dtype | torch.layout | torch.qscheme | torch.memory_format)
}
_TENSORS = {"torch.Tensor", "torch.nn.parameter.Parameter"}


def python_globals() -> list[Any]:
    """Return the types to allow in addition to those of torch, as `torch.serialization.safe_globals` takes them."""
    kinds = (bytes, frozenset, range, slice, Decimal, Namespace, PosixPath, PurePosixPath)
    times = (date, datetime, time, timedelta, timezone)
    # `pathlib._local` is where Python 3.13 defines them
    paths: list[Any] = [(PosixPath, "pathlib._local.PosixPath"), (PosixPath, "pathlib.PosixPath")]
    paths += [(PurePosixPath, "pathlib._local.PurePosixPath"), (PurePosixPath, "pathlib.PurePosixPath")]
    makes = {"_reconstruct": numpy.empty(0).__reduce__()[0], "scalar": numpy.float64().__reduce__()[0]}
    of_numpy = [numpy.ndarray, numpy.dtype, *(getattr(numpy.dtypes, name) for name in numpy.dtypes.__all__)]
    named = [(make, f"numpy.{core}.multiarray.{name}") for core in ("core", "_core") for name, make in makes.items()]
    return [*kinds, *times, *paths, *of_numpy, *named, *_ENUMS]


class TorchRules:
    """The rules for one file.

    Args:
        sizes: the size in bytes of each storage in the archive, by key.
        extra: additional types that only carry data.
    """

    def __init__(self, sizes: Mapping[str, int], extra: tuple[type, ...] = ()) -> None:
        self._sizes = sizes
        self._data_types = {_name(kind): kind for kind in (*extra, *_ENUMS)}
        self._trusted = {found[1] if isinstance(found, tuple) else _name(found) for found in get_safe_globals()}
        self._trusted -= _NOT_TRUSTED

    def find_global(self, module: str, name: str) -> Any:
        """Return a stand-in for a global. Raise a `RefusedError` if it is not allowed."""
        module, name = NAME_MAPPING.get((module, name), (IMPORT_MAPPING.get(module, module), name))  # Python 2 names
        full = f"{module}.{name}"
        known = full in _CALLS or full in self._data_types or full in self._trusted
        if not known and full not in _STORAGES and full not in _CONSTANTS and full not in _TENSORS:
            raise RefusedError(full)
        return Named(full)

    def call(self, callee: Named, args: tuple[Any, ...]) -> Any:
        """Return a stand-in for the result of a call. Raise a `PickleError` if the call is not allowed."""
        name = callee.name
        check = _CALLS.get(name)
        kind = self._data_types.get(name)
        if check is not None:
            return check(self, name, args)
        if kind is not None and not issubclass(kind, Enum):
            _require(not args, name, args)
        elif kind is not None:
            _require(len(args) == 1 and type(args[0]) in _PLAIN, name, args)
        elif name == "torch.nn.parameter.Parameter" or name == "torch.distributed.device_mesh.DeviceMesh":
            _require(not args, name, args)  # with arguments, a DeviceMesh would access process groups
        elif name not in self._trusted:
            raise PickleError(f"it calls {name}, which torch.save does not")
        return Made(name, args)

    def build(self, target: Made, state: Any) -> None:
        """Raise a `PickleError` for a state that `torch.save` does not write."""
        name = target.by
        kind = self._data_types.get(name)
        if name == "numpy.dtype":
            check_dtype(target.args[0], state)
        elif name.endswith("._reconstruct"):
            check_array(state)
        elif name in ("argparse.Namespace", "collections.OrderedDict") or (kind and not issubclass(kind, Enum)):
            _check_attributes(name, state)
        elif name not in self._trusted:
            raise PickleError(f"it sets the state of {name}, which has no state")

    def persistent_load(self, identity: Any) -> Any:
        """Return a stand-in for a storage. Raise a `PickleError` if the file does not contain all of its bytes."""
        if type(identity) is not tuple or len(identity) != 5 or identity[0] != "storage":
            raise PickleError(f"it refers to {identity!r:.100}, which is not a storage")
        _, kind, key, location, numel = identity
        if type(kind) is not Named or kind.name not in _STORAGES or type(key) is not str or type(location) is not str:
            raise PickleError(f"it refers to {identity!r:.100}, which is not a storage")
        nbytes = numel * _STORAGES[kind.name] if type(numel) is int else -1
        if not 0 <= nbytes <= self._sizes.get(key, -1):
            raise PickleError(f"its storage {key!r:.20} of {numel!r:.30} elements is not in the file")
        return Made("storage", (nbytes,))

    def rebuild_from_type(self, name: str, args: tuple[Any, ...]) -> Any:
        """Return a stand-in for a tensor of a subclass, or for a tensor with attributes."""
        _require(len(args) == 4 and all(type(arg) is Named for arg in args[:2]) and type(args[2]) is tuple, name, args)
        make, kind, inner, state = args
        _require(make.name.startswith("torch._utils._rebuild_"), name, args)
        _require(kind.name in _TENSORS or kind.name in self._trusted, name, args)
        for part in state if type(state) is tuple else (state,):
            if part is not None:
                _check_attributes(name, part)
        return Made("torch.Tensor", (self.call(make, inner), state))


def _name(kind: Any) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


# It does not check that the parts of the tensor are consistent, so it could read memory of other objects.
_NOT_TRUSTED = {"torch.nested._internal.nested_tensor._rebuild_njt"}


def _require(fits: bool, name: str, args: Any) -> None:
    if not fits:
        raise PickleError(f"it calls {name} with {args!r:.200}, which torch.save does not")


def _check_attributes(name: str, state: Any) -> None:
    fits = type(state) is dict and all(type(key) is str and not key.startswith("__") for key in state)
    if not fits:
        raise PickleError(f"it sets the state of {name} to {state!r:.100}, which is not a dict of attributes")


# Calls: each function checks the arguments of a call, and returns a stand-in for its result


def _check_plain_args(_: TorchRules, name: str, args: tuple[Any, ...]) -> Any:
    _require(all(type(arg) in _PLAIN for arg in args), name, args)
    return Made(name, args)


def _check_ints(_: TorchRules, name: str, args: tuple[Any, ...]) -> Any:
    _require(all(arg is None or type(arg) is int for arg in args), name, args)
    return Made(name, args)


def _check_time(_: TorchRules, name: str, args: tuple[Any, ...]) -> Any:
    _require(all(type(a) in _PLAIN or (type(a) is Made and a.by.startswith("datetime.")) for a in args), name, args)
    return Made(name, args)


def _check_no_args(_: TorchRules, name: str, args: tuple[Any, ...]) -> Any:
    _require(not args, name, args)
    return Made(name, args)


def _check_list(_: TorchRules, name: str, args: tuple[Any, ...]) -> Any:
    _require(len(args) <= 1 and all(type(arg) in (list, tuple) for arg in args), name, args)
    for item in args[0] if args else ():
        check_key(item)
    return Made(name, args)


def _check_dict(_: TorchRules, name: str, args: tuple[Any, ...]) -> Any:
    _require(len(args) <= 1 and all(type(arg) is dict for arg in args), name, args)
    return Made(name, args)


def _check_ordered_dict(_: TorchRules, name: str, args: tuple[Any, ...]) -> Any:
    _require(not args or (len(args) == 1 and type(args[0]) is list), name, args)
    for pair in args[0] if args else ():
        _require(type(pair) in (list, tuple) and len(pair) == 2, name, args)
        check_key(pair[0])
    return Made(name, args)


def _check_size(_: TorchRules, name: str, args: tuple[Any, ...]) -> Any:
    _require(len(args) == 1 and type(args[0]) in (tuple, list) and all(type(n) is int for n in args[0]), name, args)
    return tuple(args[0])


def _check_bytes(_: TorchRules, name: str, args: tuple[Any, ...]) -> Any:
    _require(len(args) == 2 and type(args[0]) is str and args[1] == "latin1", name, args)
    return args[0].encode("latin1")


def _check_bytearray(_: TorchRules, name: str, args: tuple[Any, ...]) -> Any:
    fits = not args or type(args[0]) is bytes if len(args) < 2 else all(type(arg) is str for arg in args)
    _require(fits and len(args) <= 2, name, args)
    return Made(name, args)


# Tensors


def _check_tensor(_: TorchRules, name: str, args: tuple[Any, ...]) -> Any:
    """Check `(storage, offset, size, stride, ...)`. torch itself checks that the view is inside the storage."""
    _require(len(args) >= 4 and type(args[0]) is Made and args[0].by == "storage", name, args)
    stored, _, size, stride = args[:4]
    for numbers in (size, stride):
        fits = type(numbers) is tuple and all(type(n) is int and 0 <= n < 2**63 for n in numbers)
        _require(fits, name, args[1:])
    is_quantized = name.endswith("qtensor")  # torch first allocates the tensor, even if it is an expanded view
    limit = stored.args[0] if is_quantized else max(stored.args[0], _MAX_EXPANDED_BYTES)
    if prod(size) > limit:
        raise PickleError(f"it has a tensor of shape {size!r:.100} in {stored.args[0]} bytes")
    for arg in args[4:]:
        _require(not (type(arg) is Made and arg.by == "collections.OrderedDict" and arg.items), name, args[1:])
    return Made("torch.Tensor", ())


def _check_parameter(_: TorchRules, name: str, args: tuple[Any, ...]) -> Any:
    _require(3 <= len(args) <= 4 and type(args[0]) is Made, name, args)
    _require(not (type(args[2]) is Made and args[2].items), name, args)  # hooks
    for part in (args[3] if type(args[3]) is tuple else (args[3],)) if len(args) == 4 else ():
        if part is not None:
            _check_attributes(name, part)
    return Made("torch.nn.parameter.Parameter", args)


def _allow(_: TorchRules, name: str, args: tuple[Any, ...]) -> Any:
    return Made("torch.Tensor", args)


# numpy


def _check_numpy_dtype(_: TorchRules, name: str, args: tuple[Any, ...]) -> Any:
    fits = len(args) == 3 and type(args[0]) is str and args[0][:1] in _KINDS and args[0][1:].isascii()
    # Without a copy, it would be the dtype object that the whole process shares.
    _require(fits and (args[0][1:] or "0").isdigit() and args[1] is False and args[2] is True, name, args)
    return Made(name, args)


_KINDS = tuple("biufcmMSUVO")


def _check_reconstruct(_: TorchRules, name: str, args: tuple[Any, ...]) -> Any:
    _require(args[:2] == (Named("numpy.ndarray"), (0,)) and args[2:] in ((b"b",), ("b",)), name, args)
    return Made(name, args)


def _check_scalar(_: TorchRules, name: str, args: tuple[Any, ...]) -> Any:
    fits = len(args) == 2 and type(args[0]) is Made and args[0].by == "numpy.dtype" and type(args[1]) is bytes
    _require(fits and args[0].args[0][0] != "O" and len(args[1]) == item_bytes(args[0]), name, args)
    return Made(name, args)


_CALLS: dict[str, Callable[[TorchRules, str, tuple[Any, ...]], Any]] = {
    **dict.fromkeys(("_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_tensor_v3", "_rebuild_qtensor"), _check_tensor),
    **dict.fromkeys(("_rebuild_parameter", "_rebuild_parameter_with_state"), _check_parameter),
    **dict.fromkeys(("_rebuild_sparse_tensor", "_rebuild_meta_tensor_no_storage", "_rebuild_wrapper_subclass"), _allow),
    **dict.fromkeys(("_rebuild_device_tensor_from_numpy", "_rebuild_device_tensor_from_cpu_tensor"), _allow),
}
_CALLS = {f"torch._utils.{name}": check for name, check in _CALLS.items()} | {
    "torch._tensor._rebuild_from_type_v2": TorchRules.rebuild_from_type,
    "torch.Size": _check_size,
    "torch.device": _check_plain_args,
    "torch.serialization._get_layout": _check_plain_args,
    "_codecs.encode": _check_bytes,
    "builtins.bytes": _check_no_args,  # empty bytes; others are pickled as `_codecs.encode`
    "builtins.bytearray": _check_bytearray,
    "builtins.set": _check_list,
    "builtins.frozenset": _check_list,
    "builtins.complex": _check_plain_args,
    "builtins.range": _check_ints,
    "builtins.slice": _check_plain_args,
    "collections.OrderedDict": _check_ordered_dict,
    "collections.Counter": _check_dict,
    "decimal.Decimal": _check_plain_args,
    "argparse.Namespace": _check_no_args,
    **{f"pathlib{of}.{name}": _check_plain_args for of in ("", "._local") for name in ("PosixPath", "PurePosixPath")},
    **{f"datetime.{name}": _check_time for name in ("date", "datetime", "time", "timedelta", "timezone")},
    "numpy.dtype": _check_numpy_dtype,
    "numpy.ndarray": lambda _, name, args: _require(False, name, args),
    **{f"numpy.{core}.multiarray._reconstruct": _check_reconstruct for core in ("core", "_core")},
    **{f"numpy.{core}.multiarray.scalar": _check_scalar for core in ("core", "_core")},
}
