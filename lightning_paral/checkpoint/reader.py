"""Open a checkpoint: one file, or a sharded folder, whose tensors are read when they are used."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from math import prod
from pathlib import Path
from reprlib import repr as short
from shlex import quote
from typing import Any

import torch
from torch import Tensor

from lightning_paral.checkpoint.archive import check_regular, read_archive
from lightning_paral.checkpoint.layout import Chunk, coverage_fault
from lightning_paral.checkpoint.lazy_tensor import LazyTensor, StoredChunk, materialize
from lightning_paral.checkpoint.manifest import FILE_NAME, META, METADATA, Manifest
from lightning_paral.checkpoint.optimizer_state import by_int
from lightning_paral.checkpoint.pickles import Made, Named, PickleError, PickleReader, opcodes
from lightning_paral.checkpoint.safe_load import load_safely
from lightning_paral.checkpoint.storage import Folder, LocalStorage, check_range, folder_at
from lightning_paral.checkpoint.tree import (
    CURRENT_KEY,
    PACKAGE_STATE_KEY,
    TreePath,
    insert,
    is_state_key,
    replace_at,
    tensors_in,
)
from lightning_paral.compat.torch.tensors import tree_map_only
from lightning_paral.errors import CheckpointError, explain_read_errors

_MODULE = "torch.distributed.checkpoint."
_DTYPES = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
_MAX_NUMBER = 2**61
_BYTES_PER_CHUNK = 8  # no pickle of a chunk is smaller
_MAX_DIMENSIONS = 64
_MAX_PATH = 64

# Lists may have elements that no path sets, such as empty dicts, which torch drops. The number of such gaps is limited,
# because a hostile path with a large index would otherwise create a huge list.
_GAPS_PER_KEY = 10
_FREE_GAPS = 10_000


# What is in `.metadata` of a Distributed Checkpoint, and where. Nothing in the file is run


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
    locations = {}
    for index, info in (fields.get("storage_data") or {}).items():
        found = _state(index, "metadata.MetadataIndex")
        offsets = found.get("offset")
        locations[_checked(found["fqn"], str), None if offsets is None else _numbers(offsets)] = _location(info)

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


# Open a checkpoint


def open_checkpoint(path: str | Path, *, weights_only: bool = True, manifest: Manifest | None = None) -> dict[str, Any]:
    """Return the checkpoint at `path` in Lightning's format, with `optimizer_states` keyed by int.

    Args:
        path: the path of a file or folder, or the URL of a folder.
        weights_only: `False` trusts the checkpoint and runs code in it.
        manifest: the manifest of the checkpoint; `None` for a checkpoint of another tool.

    Raises:
        CheckpointError: there is no checkpoint at `path`, or it is damaged.
    """
    with explain_read_errors(path):
        checkpoint = _open(path, weights_only, manifest)
        _check_structure(path, checkpoint)
        return checkpoint


def _check_structure(path: str | Path, checkpoint: dict[str, Any]) -> None:
    """Raise an error if `state_dict` or `optimizer_states` is missing or has the wrong type."""
    if "state_dict" not in checkpoint:
        raise CheckpointError(f"{path} is not a checkpoint: it has no 'state_dict'.")
    weights, states = checkpoint["state_dict"], checkpoint.get("optimizer_states", [])
    fits = isinstance(weights, Mapping) and isinstance(states, list) and all(isinstance(name, str) for name in weights)
    groups = [group for state in states for group in state.get("param_groups", [])]
    fits = fits and all(isinstance(state.get("state", {}), Mapping) for state in states)
    if not fits or not all(isinstance(group["params"], list) for group in groups):
        raise CheckpointError(
            f"{path} is damaged or not a checkpoint: its state_dict or optimizer_states has the wrong type."
        )


def _open(path: str | Path, weights_only: bool, manifest: Manifest | None) -> dict[str, Any]:
    folder = folder_at(path)
    if not isinstance(folder, LocalStorage):
        return _open_sharded(folder, weights_only, manifest)
    if folder.path.is_file():
        return _read_full(folder.path, weights_only)
    if any(folder.path.glob("*/*mp_rank_00_model_states.pt")):
        raise CheckpointError(_of_deepspeed(folder.path))
    return _open_sharded(folder, weights_only, manifest)


def _read_full(path: Path, weights_only: bool) -> dict[str, Any]:
    check_regular(path, path.stat().st_mode)
    loaded = load_safely(path, weights_only=weights_only, mmap=True)
    if not isinstance(loaded, Mapping):
        raise CheckpointError(f"{path} contains a {type(loaded).__name__}, not a checkpoint.")
    return dict(loaded)


def _of_deepspeed(path: Path) -> str:
    """Return the error about a folder of DeepSpeed, with the lines that convert it."""
    source, file, folder = (quote(f"{path.absolute()}{suffix}") for suffix in ("", "-fp32.ckpt", "-fp32"))
    code = (
        "import sys; from lightning.pytorch.utilities.deepspeed import convert_zero_checkpoint_to_fp32_state_dict as "
        "convert; convert(*sys.argv[1:])"
    )
    return (
        f"{path} is a checkpoint of DeepSpeed, which only DeepSpeed reads. Convert it once, if you trust it: this runs "
        "code in it. If Lightning's deepspeed strategies saved it, the result is a ckpt_path for every strategy, with "
        f"CheckpointOptions(restore_optimizer=False):\npython -c '{code}' {source} {file}\nOtherwise, the result are "
        f"weights for load_state_dict:\npython {quote(str(path.absolute() / 'zero_to_fp32.py'))} {source} {folder}"
    )


def _open_sharded(folder: Folder, weights_only: bool, manifest: Manifest | None) -> dict[str, Any]:
    names = manifest.names if manifest is not None else {}
    if folder.size(names.get(METADATA, METADATA)) is None:
        raise CheckpointError(f"{folder} is not a checkpoint: it has no file {METADATA}.")
    checkpoint = read_meta(folder, names.get(META, META), weights_only)
    if PACKAGE_STATE_KEY in checkpoint and manifest is None:
        raise CheckpointError(f"The checkpoint is incomplete: {folder.name(FILE_NAME)} is missing.")
    tree = read_tree(folder, names.get(METADATA, METADATA), contiguous=manifest is not None, weights_only=weights_only)
    weights = tree.pop("state_dict", None)  # other tools call the weights "model"
    checkpoint["state_dict"] = tree.pop("model", {}) if weights is None else weights
    if CURRENT_KEY in tree:
        checkpoint[CURRENT_KEY] = tree.pop(CURRENT_KEY)
    optimizers = {key: tree.pop(key) for key in list(tree) if is_state_key(key)}
    if manifest is not None:
        own = tree.pop(PACKAGE_STATE_KEY, {})  # of which each rank reads its part
        tensors = tree_map_only(LazyTensor, materialize, tree) | {PACKAGE_STATE_KEY: own}
        checkpoint = replace_at(checkpoint, dict(tensors_in(tensors)))  # the places of sharded tensors
    return by_int(checkpoint | optimizers)


# Sharded checkpoints


def read_meta(folder: Folder, name: str, weights_only: bool) -> dict[str, Any]:
    """Return the content of `meta.pt`: everything but weights and optimizer state.

    Raises:
        CheckpointError: the file is missing or damaged, or contains code and `weights_only` is `True`.
    """
    data = folder.read(name, 0, _size(folder, name))
    found = load_safely(data, weights_only=weights_only, name=folder.name(name))
    if not isinstance(found, Mapping) or not all(isinstance(key, str) for key in found):
        raise CheckpointError(f"{folder.name(name)} is damaged: it contains no dict with names.")
    return dict(found)


def read_tree(folder: Folder, name: str, *, contiguous: bool, weights_only: bool) -> dict[str, Any]:
    """Return the content of a Distributed Checkpoint as nested dicts and lists, with tensors as `LazyTensor`.

    Args:
        folder: the folder of the checkpoint.
        name: the name of the file with the metadata.
        contiguous: whether all chunks are known to be row-major, as this package writes them.
        weights_only: `False` trusts values that are not tensors, and runs code in them.

    Raises:
        CheckpointError: the metadata is damaged, or does not match the files.
    """
    size_of = cache(partial(_size, folder))

    def checked(place: Location) -> Location:
        check_range(folder.name(place.file), place.offset, place.length, size_of(place.file))
        return place

    def read_object(key: str, place: Location) -> Any:
        data = folder.read(place.file, place.offset, place.length)
        return load_safely(data, weights_only=weights_only, name=f"{key} in {folder.name(place.file)}")

    def lazy_tensor(about: Entry) -> LazyTensor:
        chunks = []
        for chunk, place in about.chunks:
            if chunk.numel * about.dtype.itemsize > checked(place).length:
                raise CheckpointError(
                    f"{folder.name(name)} is damaged: {about.key} has a chunk of sizes {chunk.sizes} in {place.length} "
                    "bytes."
                )
            folder.hold(place.file)
            read = _reader(folder, place, chunk, about.dtype, contiguous)
            chunks.append(StoredChunk(chunk, read, (place.file, place.offset)))
        fault = coverage_fault(about.shape, [stored.chunk for stored in chunks])
        if fault is not None:
            raise CheckpointError(f"The chunks of {about.key} in {folder} do not cover the tensor: {fault}.")
        return LazyTensor(about.shape, about.dtype, chunks)

    entries = load_metadata(bytes(folder.read(name, 0, size_of(name))), folder.name(name))
    objects = [checked(about.location) for about in entries if about.location is not None]
    files = {os.path.normpath(place.file) for place in objects}
    if sum(place.length for place in objects) > sum(map(size_of, files)):
        raise CheckpointError(f"{folder.name(name)} is damaged or hostile: its objects overlap.")
    tree: dict[str, Any] = {}
    gaps_left = [_GAPS_PER_KEY * len(entries) + _FREE_GAPS]
    for about in entries:
        place = about.location
        value = lazy_tensor(about) if place is None else read_object(about.key, place)
        try:
            insert(tree, about.path, value, gaps_left)
        except (TypeError, ValueError) as error:
            raise CheckpointError(
                f"{folder.name(name)} is damaged: {about.key} has an invalid path ({error})."
            ) from error
    return tree


def _size(folder: Folder, file: str) -> int:
    size = folder.size(file)
    if size is None:
        raise CheckpointError(f"The checkpoint is incomplete: {folder.name(file)} is missing.")
    return size


def _reader(
    folder: Folder, place: Location, chunk: Chunk, dtype: torch.dtype, contiguous: bool
) -> Callable[[], Tensor]:
    def read() -> Tensor:
        name = folder.name(place.file)
        data = folder.read(place.file, place.offset, place.length)
        if contiguous:
            return _view(data, chunk, dtype, name)
        loaded = load_safely(data, name=name)
        if not isinstance(loaded, Tensor) or loaded.shape != chunk.sizes or loaded.dtype != dtype:
            raise _no_chunk(name, chunk)
        return loaded

    return read


def _view(data: memoryview, chunk: Chunk, dtype: torch.dtype, name: str) -> Tensor:
    """Return the tensor that `torch.save` wrote to `data`, without copying it."""
    if chunk.numel == 0:
        return torch.empty(chunk.sizes, dtype=dtype)
    archive = read_archive(lambda offset, size: bytes(data[offset : offset + size]), len(data), name)
    found = [record for key, record in archive.records.items() if key.endswith("/data/0")] if archive else []
    if len(found) != 1 or found[0].size != chunk.numel * dtype.itemsize:
        raise _no_chunk(name, chunk)
    return torch.frombuffer(data, dtype=dtype, count=chunk.numel, offset=found[0].start).view(chunk.sizes)


def _no_chunk(name: str, chunk: Chunk) -> CheckpointError:
    return CheckpointError(f"{name} is damaged: it does not contain a chunk of sizes {chunk.sizes} where it should.")
