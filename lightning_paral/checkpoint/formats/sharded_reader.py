"""Reading the folder of a Distributed Checkpoint: its metadata now, its tensors when they are used."""

import io
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

from lightning_paral.checkpoint.formats.dcp_metadata import load_metadata
from lightning_paral.checkpoint.io.storage import Folder, check_range
from lightning_paral.checkpoint.layout import Chunk, coverage_fault
from lightning_paral.checkpoint.lazy_tensor import LazyTensor, StoredChunk
from lightning_paral.checkpoint.safe_load.archive import read_archive
from lightning_paral.checkpoint.safe_load.unpickle import load_safely
from lightning_paral.errors import CheckpointError

_GAPS_PER_KEY = 10
_FREE_GAPS = 10_000


def read_meta(folder: Folder, name: str, weights_only: bool) -> dict[str, Any]:
    """Return what a folder holds beside tensors.

    Raises:
        CheckpointError: it is missing or damaged.
    """
    size = folder.size(name)
    if size is None:
        raise CheckpointError(f"{folder.name(name)} is missing: the checkpoint is incomplete.")
    found = load_safely(_View(folder.read(name, 0, size)), weights_only=weights_only, name=folder.name(name))
    if not isinstance(found, Mapping):
        raise CheckpointError(f"{folder.name(name)} holds a {type(found).__name__}, not what is beside tensors.")
    return dict(found)


def read_tree(folder: Folder, name: str, *, contiguous: bool, weights_only: bool) -> dict[str, Any]:
    """Return what a Distributed Checkpoint holds, nested, with tensors unread.

    Args:
        folder: where it lies.
        name: of the file with its metadata.
        contiguous: whether all boxes are known to lie in row-major order, as this package writes them.
        weights_only: `False` trusts what lies there beside tensors.

    Raises:
        CheckpointError: its metadata are damaged, or do not fit its files.
    """
    size = folder.size(name)
    if size is None:
        raise CheckpointError(f"{folder.name(name)} is missing: the checkpoint is incomplete.")
    metadata = load_metadata(bytes(folder.read(name, 0, size)), folder.name(name))

    def place(key: str, offsets: torch.Size | None = None) -> Any:
        info = metadata.storage_data.get(MetadataIndex(key, offsets))
        if info is None:
            box = "" if offsets is None else f" from {tuple(offsets)} on"
            raise CheckpointError(f"{folder.name(name)} does not say where {key}{box} lies: it is incomplete.")
        held = folder.size(info.relative_path)
        if held is None:
            raise CheckpointError(f"{folder.name(info.relative_path)} is missing: the checkpoint is incomplete.")
        check_range(folder.name(info.relative_path), info.offset, info.length, held)
        return info

    tree: dict[str, Any] = {}
    room = [_GAPS_PER_KEY * len(metadata.state_dict_metadata) + _FREE_GAPS]
    for key, kind in metadata.state_dict_metadata.items():
        value: Any
        if isinstance(kind, BytesStorageMetadata):
            info = place(key)
            data = folder.read(info.relative_path, info.offset, info.length)
            entry = f"{key} in {folder.name(info.relative_path)}"
            value = load_safely(_View(data), weights_only=weights_only, name=entry)
        else:
            pieces = []
            for chunk in kind.chunks:
                info = place(key, chunk.offsets)
                box = Chunk(tuple(chunk.offsets), tuple(chunk.sizes))
                if box.numel * kind.properties.dtype.itemsize > info.length:
                    raise CheckpointError(
                        f"{folder.name(name)} is damaged: {key} has a box of sizes {box.sizes} in {info.length} bytes."
                    )
                folder.hold(info.relative_path)
                read = _reader(folder, info, box, kind.properties.dtype, contiguous)
                pieces.append(StoredChunk(box, read, (info.relative_path, info.offset)))
            fault = coverage_fault(kind.size, [piece.chunk for piece in pieces])
            if fault is not None:
                raise CheckpointError(f"{folder} does not hold all of {key}: {fault}.")
            value = LazyTensor(kind.size, kind.properties.dtype, pieces)
        try:
            _put(tree, (metadata.planner_data or {}).get(key, (key,)), value, room)
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"{folder.name(name)} is damaged: {key} has no place ({error}).") from error
    return tree


def _put(tree: dict[str, Any], path: tuple[str | int, ...], value: Any, room: list[int]) -> None:
    """Put `value` to its place in nested dicts and lists, which numbers in `path` index.

    Args:
        tree: the outermost dict.
        path: where to.
        value: what.
        room: how many elements lists may get that nothing is put to, of all calls.

    Raises:
        ValueError: lists would get longer than what is put to them.
        TypeError: another value is where the path leads through.
    """
    here: Any = tree
    step: Any
    for step, following in zip(path, (*path[1:], None), strict=True):
        if isinstance(here, list):
            if not isinstance(step, int):
                raise TypeError(f"a list has no {step!r:.100}")
            room[0] -= max(0, step - len(here))
            if room[0] < 0:
                raise ValueError(f"index {step} is beyond all that is there")
            here.extend([None] * (step + 1 - len(here)))
        elif not isinstance(here, dict):
            raise TypeError(f"{step!r:.100} is in a {type(here).__name__}")
        if following is None:
            here[step] = value
            return
        inner = here[step] if isinstance(here, list) or step in here else None
        if inner is None:
            inner = here[step] = [] if isinstance(following, int) else {}
        here = inner


def _reader(folder: Folder, info: Any, box: Chunk, dtype: torch.dtype, contiguous: bool) -> Callable[[], Tensor]:
    def read() -> Tensor:
        name = folder.name(info.relative_path)
        data = folder.read(info.relative_path, info.offset, info.length)
        if contiguous:
            return _values(data, box, dtype, name)
        loaded = load_safely(_View(data), name=name)
        if not isinstance(loaded, Tensor) or loaded.shape != box.sizes or loaded.dtype != dtype:
            raise CheckpointError(f"{name} is damaged: at {info.offset} it holds {_said(loaded)}, not {box.sizes}.")
        return loaded

    return read


def _said(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def _values(data: memoryview, box: Chunk, dtype: torch.dtype, name: str) -> Tensor:
    """Return the elements of a box from what `torch.save` wrote of it, without a copy."""
    if box.numel == 0:
        return torch.empty(box.sizes, dtype=dtype)
    archive = read_archive(lambda offset, size: bytes(data[offset : offset + size]), len(data), name)
    found = [record for key, record in archive.records.items() if key.endswith("/data/0")] if archive else []
    if len(found) != 1 or found[0].size != box.numel * dtype.itemsize:
        raise CheckpointError(f"{name} is damaged: it does not hold a box of sizes {box.sizes}.")
    return torch.frombuffer(data, dtype=dtype, count=box.numel, offset=found[0].start).view(box.sizes)


class _View(io.RawIOBase):
    """A part of a mapped file as a file, without a copy."""

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
