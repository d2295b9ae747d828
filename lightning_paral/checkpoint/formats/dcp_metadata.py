"""Parse `.metadata` of a Distributed Checkpoint as plain data, validate it, and only then create torch's objects."""

from collections.abc import Callable
from math import prod
from pathlib import PurePosixPath
from typing import Any, TypeVar

import torch
from torch.distributed.checkpoint import metadata

from lightning_paral.checkpoint.safe_load.opcodes import Made, Named, PickleError, RefusedError, interpret
from lightning_paral.compat.torch.distributed_checkpoint import StorageInfo
from lightning_paral.errors import CheckpointError

T = TypeVar("T")

_DCP = "torch.distributed.checkpoint.metadata."
_STORAGE_INFO = "torch.distributed.checkpoint.filesystem._StorageInfo"
_MEMORY_FORMAT = f"{_DCP}_MEM_FORMAT_ENCODING"
_RECORDS = {
    _STORAGE_INFO,
    *(f"{_DCP}{name}" for name in ("Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata")),
    *(f"{_DCP}{name}" for name in ("ChunkStorageMetadata", "TensorProperties", "StorageMeta")),
}
_PATHS = {f"{module}.{name}" for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "WindowsPath")} | {
    "pathlib.PurePosixPath",
    "pathlib.PureWindowsPath",
}
_VALUES = {_MEMORY_FORMAT, "torch.Size", "torch.serialization._get_layout", "builtins.getattr", *_PATHS}
_DTYPES = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
_LAYOUTS = {str(value): value for value in vars(torch).values() if isinstance(value, torch.layout)}
_MAX_NUMBER = 2**63
_BYTES_PER_CHUNK = 8  # no pickle of a chunk is smaller
_MAX_DIMENSIONS = 64
_MAX_PATH = 64


class _UnsupportedError(PickleError):
    """The metadata are sound, but use a feature that is not supported."""


class _MetadataRules:
    """Allows only the types that occur in the metadata of a Distributed Checkpoint."""

    def find_global(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        if full in _DTYPES:
            return _DTYPES[full]
        if full not in _RECORDS and full not in _VALUES and full != "collections.OrderedDict":
            raise RefusedError(full)
        return Named(full)

    def call(self, callee: Named, args: tuple[Any, ...]) -> Any:
        name = callee.name
        if name == "torch.Size" and len(args) == 1 and type(args[0]) in (tuple, list):
            return tuple(args[0])
        if name == "torch.serialization._get_layout" and len(args) == 1 and _is(str, args[0]):
            return _LAYOUTS[args[0]]
        if name == "builtins.getattr":  # how Python 3.11 and older pickle enum members
            if len(args) == 2 and args[0] == Named(_MEMORY_FORMAT) and _is(str, args[1]):
                return Made(_MEMORY_FORMAT, args)
            raise RefusedError(name)
        if name == "collections.OrderedDict" and not args:
            return {}
        if name in _PATHS and all(_is(str, part) for part in args):
            return PurePosixPath(*args)
        if name == _MEMORY_FORMAT or (name in _RECORDS and not args):
            return Made(name, args)
        raise PickleError(f"it calls {name} with {len(args)} arguments, which never occurs in metadata")

    def build(self, target: Made, state: Any) -> None:
        if target.by not in _RECORDS or type(state) is not (tuple if target.by.endswith("TensorProperties") else dict):
            raise PickleError(f"it sets attributes of {target.by}, which is not allowed")

    def persistent_load(self, identity: Any) -> Any:
        raise PickleError("it refers to data outside the pickle")


def load_metadata(data: bytes, name: object) -> metadata.Metadata:
    """Return the metadata in the file `.metadata` of a Distributed Checkpoint, without running code from the file.

    Fields that this version of torch does not have are dropped, and missing fields get their defaults.

    Args:
        data: the content of the file.
        name: the name of the file, for error messages.

    Raises:
        CheckpointError: the file is damaged, or contains anything other than metadata.
    """
    try:
        return _metadata(interpret(data, _MetadataRules()), len(data))
    except RefusedError as error:
        raise CheckpointError(
            f"{name} refers to {error.name}, which never occurs in the metadata of a checkpoint. The file is damaged "
            "or hostile, and was not loaded."
        ) from error
    except _UnsupportedError as error:
        raise CheckpointError(f"{name} cannot be loaded: {error}.") from error
    except PickleError as error:
        raise CheckpointError(f"{name} is damaged or hostile: {error}.") from error
    except (LookupError, TypeError, ValueError) as error:
        raise CheckpointError(f"{name} is damaged or hostile: {error!r} in its metadata.") from error


def _metadata(root: Any, nbytes: int) -> metadata.Metadata:
    if type(root) is not Made or root.by != f"{_DCP}Metadata":
        raise PickleError("it is not the metadata of a Distributed Checkpoint")
    fields = _state(root, "Metadata")
    tensors = {_key(key): value for key, value in _dict(fields["state_dict_metadata"], "tensors").items()}
    num_chunks = sum(len(_fields_of_tensor(value)["chunks"]) for value in tensors.values() if not _is_bytes(value))
    if num_chunks * _BYTES_PER_CHUNK > nbytes:
        raise PickleError(f"it has {num_chunks} chunks in {nbytes} bytes, which is impossible")
    state = {key: metadata.BytesStorageMetadata() if _is_bytes(v) else _tensor(key, v) for key, v in tensors.items()}
    storage = _optional(fields.get("storage_data"), lambda found: _dict(found, "locations"))
    locations = {_index(key): _storage_info(value) for key, value in (storage or {}).items()}
    about = _optional(fields.get("storage_meta"), lambda found: _storage_meta(found))
    return metadata.Metadata(
        state_dict_metadata=state,
        planner_data=_optional(fields.get("planner_data"), _planner_data),
        storage_data=locations,
        **_known(metadata.Metadata, storage_meta=about, version=_optional(fields.get("version"), _key)),
    )


def _known(cls: Any, **fields: Any) -> dict[str, Any]:
    """Return those of `fields` that the dataclass `cls` has in this version of torch."""
    return {name: value for name, value in fields.items() if name in cls.__dataclass_fields__}


def _tensor(key: str, found: Any) -> metadata.TensorStorageMetadata:
    fields = _fields_of_tensor(found)
    size = _numbers(fields["size"], f"the shape of {key}")
    properties = fields["properties"]
    if type(properties) is not Made or not properties.by.endswith(".TensorProperties"):
        raise PickleError(f"{key} has no properties")
    dtype = properties.state[0] if properties.state else None
    if not isinstance(dtype, torch.dtype):
        raise PickleError(f"{key} has no dtype")
    if prod(size) * dtype.itemsize >= _MAX_NUMBER:
        raise PickleError(f"the shape of {key} is {size}, which is too large")
    chunks = []
    for chunk in fields["chunks"]:
        about = _state(chunk, "ChunkStorageMetadata")
        bounds = [_numbers(about[name], f"a chunk of {key}") for name in ("offsets", "sizes")]
        if any(len(numbers) != len(size) for numbers in bounds):
            raise PickleError(
                f"a chunk of {key} has a different number of dimensions than the tensor, whose shape is {size}"
            )
        chunks.append(metadata.ChunkStorageMetadata(*map(torch.Size, bounds)))
    return metadata.TensorStorageMetadata(metadata.TensorProperties(dtype), torch.Size(size), chunks)


def _fields_of_tensor(found: Any) -> dict[str, Any]:
    fields = _state(found, "TensorStorageMetadata")
    if type(fields["chunks"]) is not list:
        raise PickleError("a tensor has no list of chunks")
    return fields


def _is_bytes(found: Any) -> bool:
    return type(found) is Made and found.by == f"{_DCP}BytesStorageMetadata"


def _index(found: Any) -> metadata.MetadataIndex:
    fields = _state(found, "MetadataIndex")
    offset = _optional(fields.get("offset"), lambda numbers: _numbers(numbers, "an offset"))
    return metadata.MetadataIndex(_key(fields["fqn"]), offset)


def _storage_info(found: Any) -> Any:
    if type(found) is not Made or found.by != _STORAGE_INFO:
        raise PickleError("it does not give the locations of tensors")
    fields = found.state
    offset, length = _numbers((fields["offset"], fields["length"]), "a location in a file")
    if fields.get("transform_descriptors"):
        raise _UnsupportedError(
            f"{_key(fields['relative_path'])} was written with transforms ({fields['transform_descriptors']}), such as "
            "compression, which are not supported. Load the checkpoint with torch.distributed.checkpoint, and save it "
            "without transforms"
        )
    return StorageInfo(_key(fields["relative_path"]), offset, length)


def _planner_data(found: Any) -> dict[str, tuple[str | int, ...]] | None:
    """Return the path of each key in nested dicts and lists; `None` if a custom planner wrote the metadata."""
    if type(found) is not dict:
        return None
    paths = {}
    for key, path in found.items():
        if type(path) not in (tuple, list) or not 0 < len(path) <= _MAX_PATH:
            raise PickleError(f"the path of {key!r:.100} is empty, too long or of the wrong type")
        if not all(_is(str, step) or (_is(int, step) and 0 <= step < _MAX_NUMBER) for step in path):
            raise PickleError(f"{key!r:.100} has the invalid path {path!r:.100}")
        paths[_key(key)] = tuple(path)
    return paths


def _storage_meta(found: Any) -> Any:
    fields = _state(found, "StorageMeta")
    kept = {name: str(fields[name]) for name in ("save_id", "load_id") if _is(str, fields.get(name))}
    return metadata.StorageMeta(**_known(metadata.StorageMeta, **kept))


def _state(found: Any, name: str) -> dict[str, Any]:
    if type(found) is not Made or found.by != f"{_DCP}{name}" or type(found.state) is not dict:
        raise PickleError(f"it has {found.by if type(found) is Made else type(found).__name__} instead of a {name}")
    return found.state


def _dict(found: Any, what: str) -> dict[Any, Any]:
    if type(found) is not dict:
        raise PickleError(f"it has no dict of {what}")
    return found


def _key(found: Any) -> str:
    if type(found) is not str:
        raise PickleError(f"it has a {type(found).__name__} instead of a name")
    return found


def _numbers(found: Any, what: str) -> tuple[int, ...]:
    if type(found) is not tuple or len(found) > _MAX_DIMENSIONS:
        raise PickleError(f"{what} is not a tuple of sizes")
    if not all(type(number) is int and 0 <= number < _MAX_NUMBER for number in found):
        raise PickleError(f"{what} is {found!r:.100}")
    return found


def _optional(found: Any, read: Callable[[Any], T]) -> T | None:
    return None if found is None else read(found)


def _is(cls: type, value: Any) -> bool:
    return type(value) is cls
