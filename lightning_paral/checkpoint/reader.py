"""Read a sharded checkpoint: `.metadata`, whose tensors are read when they are used, and `meta.pt`."""

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
from lightning_paral.checkpoint.tree import insert
from lightning_paral.errors import CheckpointError

# Lists may have elements that no path sets, such as empty dicts, which torch drops. The number of such gaps is limited,
# because a hostile path with a large index would otherwise create a huge list.
_GAPS_PER_KEY = 10
_FREE_GAPS = 10_000


def read_meta(folder: Folder, name: str, weights_only: bool) -> dict[str, Any]:
    """Return the content of `meta.pt`: everything but weights and optimizer state.

    Raises:
        CheckpointError: the file is missing or damaged, or contains code and `weights_only` is `True`.
    """
    found = load_safely(_read_file(folder, name), weights_only=weights_only, name=folder.name(name))
    if not isinstance(found, Mapping):
        raise CheckpointError(f"{folder.name(name)} contains a {type(found).__name__}, not a dict.")
    return dict(found)


def _read_file(folder: Folder, name: str) -> memoryview:
    size = folder.size(name)
    if size is None:
        raise CheckpointError(f"The checkpoint is incomplete: {folder.name(name)} is missing.")
    return folder.read(name, 0, size)


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
    metadata = load_metadata(bytes(_read_file(folder, name)), folder.name(name))

    def locate(key: str, offsets: torch.Size | None = None) -> Any:
        info = metadata.storage_data.get(MetadataIndex(key, offsets))
        if info is None:
            at = "" if offsets is None else f" at {tuple(offsets)}"
            raise CheckpointError(f"{folder.name(name)} is incomplete: it has no location for {key}{at}.")
        size = folder.size(info.relative_path)
        if size is None:
            raise CheckpointError(f"The checkpoint is incomplete: {folder.name(info.relative_path)} is missing.")
        check_range(folder.name(info.relative_path), info.offset, info.length, size)
        return info

    def read_object(key: str) -> Any:
        info = locate(key)
        data = folder.read(info.relative_path, info.offset, info.length)
        return load_safely(data, weights_only=weights_only, name=f"{key} in {folder.name(info.relative_path)}")

    def lazy_tensor(key: str, about: Any) -> LazyTensor:
        dtype, chunks = about.properties.dtype, []
        for found in about.chunks:
            info = locate(key, found.offsets)
            chunk = Chunk(tuple(found.offsets), tuple(found.sizes))
            if chunk.numel * dtype.itemsize > info.length:
                raise CheckpointError(
                    f"{folder.name(name)} is damaged: {key} has a chunk of sizes {chunk.sizes} in {info.length} bytes."
                )
            folder.hold(info.relative_path)
            read = _reader(folder, info, chunk, dtype, contiguous)
            chunks.append(StoredChunk(chunk, read, (info.relative_path, info.offset)))
        fault = coverage_fault(about.size, [stored.chunk for stored in chunks])
        if fault is not None:
            raise CheckpointError(f"The chunks of {key} in {folder} do not cover the tensor: {fault}.")
        return LazyTensor(about.size, dtype, chunks)

    tree: dict[str, Any] = {}
    gaps_left = [_GAPS_PER_KEY * len(metadata.state_dict_metadata) + _FREE_GAPS]
    for key, about in metadata.state_dict_metadata.items():
        value = read_object(key) if isinstance(about, BytesStorageMetadata) else lazy_tensor(key, about)
        try:
            insert(tree, (metadata.planner_data or {}).get(key, (key,)), value, gaps_left)
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"{folder.name(name)} is damaged: {key} has an invalid path ({error}).") from error
    return tree


def _reader(folder: Folder, info: Any, chunk: Chunk, dtype: torch.dtype, contiguous: bool) -> Callable[[], Tensor]:
    def read() -> Tensor:
        name = folder.name(info.relative_path)
        data = folder.read(info.relative_path, info.offset, info.length)
        if contiguous:
            return _view(data, chunk, dtype, name)
        loaded = load_safely(data, name=name)
        if not isinstance(loaded, Tensor) or loaded.shape != chunk.sizes or loaded.dtype != dtype:
            is_tensor = isinstance(loaded, Tensor)
            found = f"a tensor of shape {tuple(loaded.shape)}" if is_tensor else f"a {type(loaded).__name__}"
            raise CheckpointError(
                f"{name} is damaged: at byte {info.offset} it contains {found}, not a chunk of sizes {chunk.sizes}."
            )
        return loaded

    return read


def _view(data: memoryview, chunk: Chunk, dtype: torch.dtype, name: str) -> Tensor:
    """Return the tensor that `torch.save` wrote to `data`, without copying it."""
    if chunk.numel == 0:
        return torch.empty(chunk.sizes, dtype=dtype)
    archive = read_archive(lambda offset, size: bytes(data[offset : offset + size]), len(data), name)
    found = [record for key, record in archive.records.items() if key.endswith("/data/0")] if archive else []
    if len(found) != 1 or found[0].size != chunk.numel * dtype.itemsize:
        raise CheckpointError(f"{name} is damaged: it does not contain a chunk of sizes {chunk.sizes}.")
    return torch.frombuffer(data, dtype=dtype, count=chunk.numel, offset=found[0].start).view(chunk.sizes)
