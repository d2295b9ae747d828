"""Read `.metadata` of a Distributed Checkpoint: what is in it, and where. Nothing in the file is run."""

from collections import Counter
from dataclasses import dataclass
from math import prod
from reprlib import repr as short
from typing import Any

import torch

from lightning_paral.checkpoint.layout import Chunk
from lightning_paral.checkpoint.pickles import Made, Named, PickleError, PickleReader, count_hash, opcodes
from lightning_paral.checkpoint.tree import TreePath
from lightning_paral.errors import CheckpointError

METADATA = ".metadata"
"""Name of the file with the location of each value, in the format of Distributed Checkpoint."""
META = "meta.pt"
"""Name of the file with everything except weights and optimizer state."""

_MODULE = "torch.distributed.checkpoint."
_DTYPES = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
_MAX_NUMBER = 2**61 - 1  # the hashes of larger numbers can collide
_BYTES_PER_CHUNK = 8  # no pickle of a chunk is smaller
_MAX_DIMENSIONS = 64
_MAX_PATH = 64


@dataclass(frozen=True)
class Location:
    """Bytes of a file of the checkpoint."""

    file: str
    """The name of the file relative to the folder, which is not checked."""
    offset: int
    length: int


@dataclass(frozen=True)
class Entry:
    """A value in a Distributed Checkpoint."""

    key: str
    path: TreePath
    """Where the value belongs in nested dicts and lists."""
    location: Location | None
    """The bytes of a value that is not a tensor; `None` for a tensor."""
    dtype: torch.dtype = torch.uint8
    shape: tuple[int, ...] = ()
    chunks: tuple[tuple[Chunk, Location], ...] = ()


def load_metadata(data: bytes, name: object) -> list[Entry]:
    """Return the values in a checkpoint whose file `.metadata` has the content `data`. Unknown fields are ignored.

    Args:
        data: the content of the file.
        name: the name of the file, for error messages.

    Raises:
        CheckpointError: the file is damaged, or is not the metadata of a checkpoint.
    """
    try:
        return _entries(_MetadataPickle(data).read_all(), len(data))
    except (PickleError, LookupError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{name} is damaged, hostile or not supported: {error}.") from error


class _MetadataPickle(PickleReader):
    dispatch = PickleReader.dispatch | opcodes("FRAME MEMOIZE SHORT_BINUNICODE STACK_GLOBAL")  # of protocols above 2

    def call(self, name: str, args: tuple[Any, ...]) -> Any:
        """Return plain containers, and stand-ins for everything else, whatever it is."""
        if name == "torch.Size" and type(args[0]) in (tuple, list):
            return tuple(args[0])
        return {} if name == "collections.OrderedDict" and not args else Made(name, args)


def _entries(root: Any, nbytes: int) -> list[Entry]:
    fields = _state(root, "metadata.Metadata")
    paths = fields.get("planner_data")
    paths = paths if type(paths) is dict else {}  # a custom planner may have written other data
    locations, hashes = {}, Counter[int]()
    for index, info in (fields.get("storage_data") or {}).items():
        found = _state(index, "metadata.MetadataIndex")
        offsets = found.get("offset")
        at = _checked(found["fqn"], str), None if offsets is None else _numbers(offsets)
        count_hash(at, hashes)
        locations[at] = _location(info)

    def locate(key: str, offsets: tuple[int, ...] | None = None) -> Location:
        if (key, offsets) not in locations:
            raise PickleError(f"it has no location for {key}" + ("" if offsets is None else f" at {offsets}"))
        return locations[key, offsets]

    entries = []
    chunks_left = nbytes // _BYTES_PER_CHUNK
    for key, value in _checked(fields["state_dict_metadata"], dict).items():
        path = _path(paths.get(_checked(key, str), (key,)))
        if type(value) is Made and value.by == f"{_MODULE}metadata.BytesStorageMetadata":
            entries.append(Entry(key, path, locate(key)))
            continue
        about = _state(value, "metadata.TensorStorageMetadata")
        chunks_left -= len(_checked(about["chunks"], list))
        if chunks_left < 0:
            raise PickleError(f"it has more chunks than fit in {nbytes} bytes")
        dtype, shape = _DTYPES[_checked(about["properties"].state[0], Named).name], _numbers(about["size"])
        chunks = list(map(_chunk, about["chunks"]))
        if any(len(chunk.offsets) != len(shape) or len(chunk.sizes) != len(shape) for chunk in chunks):
            raise PickleError(f"a chunk of {key} has other dimensions than the tensor, whose shape is {shape}")
        if prod(shape) * dtype.itemsize >= _MAX_NUMBER:
            raise PickleError(f"the shape of {key} is {shape}, which is too large")
        entries.append(Entry(key, path, None, dtype, shape, tuple((c, locate(key, c.offsets)) for c in chunks)))
    return entries


def _chunk(found: Any) -> Chunk:
    fields = _state(found, "metadata.ChunkStorageMetadata")
    return Chunk(_numbers(fields["offsets"]), _numbers(fields["sizes"]))


def _location(found: Any) -> Location:
    fields = _state(found, "filesystem._StorageInfo")
    offset, length = _numbers((fields["offset"], fields["length"]))
    if fields.get("transform_descriptors"):
        raise PickleError(
            f"{short(fields['relative_path'])} was written with transforms ({short(fields['transform_descriptors'])}), "
            "such as compression, which are not supported. Load the checkpoint with torch.distributed.checkpoint, and "
            "save it without transforms"
        )
    return Location(_checked(fields["relative_path"], str), offset, length)


def _path(found: Any) -> TreePath:
    fits = type(found) in (tuple, list) and 0 < len(found) <= _MAX_PATH
    if not fits or not all(type(step) is str or (type(step) is int and 0 <= step < _MAX_NUMBER) for step in found):
        raise PickleError(f"a value has the invalid path {short(found)}")
    return tuple(found)


def _state(found: Any, name: str) -> dict[str, Any]:
    """Return the fields of a dataclass of torch, of which `found` is the stand-in."""
    if type(found) is not Made or found.by != f"{_MODULE}{name}":
        what = found.by if type(found) is Made else f"a {type(found).__name__}"
        raise PickleError(f"it has {what} instead of {_MODULE}{name}")
    state: dict[str, Any] = _checked(found.state, dict)
    return state


def _checked(found: Any, kind: type) -> Any:
    if type(found) is not kind:
        raise PickleError(f"it has a {type(found).__name__} instead of a {kind.__name__}")
    return found


def _numbers(found: Any) -> tuple[int, ...]:
    fits = type(found) is tuple and len(found) <= _MAX_DIMENSIONS
    if not fits or not all(type(number) is int and 0 <= number < _MAX_NUMBER for number in found):
        raise PickleError(f"it has the sizes or offsets {short(found)}")
    numbers: tuple[int, ...] = found
    return numbers
