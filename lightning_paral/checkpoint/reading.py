"""Reading the folder of a Distributed Checkpoint: its metadata now, its tensors when they are used."""

import io
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

from lightning_paral.checkpoint.files import Folder
from lightning_paral.checkpoint.geometry import Box, coverage_fault
from lightning_paral.checkpoint.stored import StoredPiece, StoredTensor
from lightning_paral.checkpoint.unpickle import load_metadata, load_safely
from lightning_paral.errors import CheckpointError


def read_meta(folder: Folder, name: str, weights_only: bool) -> dict[str, Any]:
    """Return what a folder holds beside tensors."""
    size = folder.size(name)
    if size is None:
        raise CheckpointError(f"{folder.name(name)} is missing: the checkpoint is incomplete.")
    file = io.BytesIO(folder.read(name, 0, size))
    return dict(load_safely(file, weights_only=weights_only, name=folder.name(name)))


def read_tree(folder: Folder, name: str, *, contiguous: bool, weights_only: bool) -> dict[str, Any]:
    """Return what a Distributed Checkpoint holds, nested, with tensors unread.

    Args:
        folder: where it lies.
        name: of the file with its metadata.
        contiguous: whether all boxes are known to lie in row-major order, as this package writes them.
        weights_only: `False` trusts what lies there beside tensors.
    """
    size = folder.size(name)
    if size is None:
        raise CheckpointError(f"{folder.name(name)} is missing: the checkpoint is incomplete.")
    metadata = load_metadata(io.BytesIO(folder.read(name, 0, size)), folder.name(name))

    def place(key: str, offsets: torch.Size | None = None) -> Any:
        info = metadata.storage_data.get(MetadataIndex(key, offsets))
        if info is None:
            box = "" if offsets is None else f" from {tuple(offsets)} on"
            raise CheckpointError(f"{folder.name(name)} does not say where {key}{box} lies: it is incomplete.")
        return info

    tree: dict[str, Any] = {}
    for key, kind in metadata.state_dict_metadata.items():
        value: Any
        if isinstance(kind, BytesStorageMetadata):
            info = place(key)
            data = folder.read(info.relative_path, info.offset, info.length)
            entry = f"{key} in {folder.name(info.relative_path)}"
            value = load_safely(io.BytesIO(data), weights_only=weights_only, name=entry)
        else:
            pieces = []
            for chunk in kind.chunks:
                info = place(key, chunk.offsets)
                folder.hold(info.relative_path)
                box = Box(tuple(chunk.offsets), tuple(chunk.sizes))
                read = _reader(folder, info, box, kind.properties.dtype, contiguous)
                pieces.append(StoredPiece(box, read, (info.relative_path, info.offset)))
            fault = None if contiguous else coverage_fault(kind.size, [piece.box for piece in pieces])
            if fault is not None:
                raise CheckpointError(f"{folder} does not hold all of {key}: {fault}.")
            value = StoredTensor(kind.size, kind.properties.dtype, pieces)
        set_element(tree, (metadata.planner_data or {}).get(key, (key,)), value)
    return tree


def _reader(folder: Folder, info: Any, box: Box, dtype: torch.dtype, contiguous: bool) -> Any:
    def read() -> Tensor:
        data = folder.read(info.relative_path, info.offset, info.length)
        if not contiguous:
            loaded: Tensor = load_safely(_View(data), name=folder.name(info.relative_path))
            return loaded
        reader: Any = torch._C.PyTorchFileReader(_View(data))  # type: ignore[call-overload]
        offset = reader.get_record_offset("data/0")
        return torch.frombuffer(data, dtype=dtype, count=box.numel, offset=offset).view(box.sizes)

    return read


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
