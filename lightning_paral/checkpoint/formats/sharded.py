"""The sharded format: a folder that is an ordinary Distributed Checkpoint, with one file per rank and `meta.pt`.

Keys and file names are those of Lightning's `ModelParallelStrategy`. That strategy, `torch.distributed.checkpoint` and
`dcp_to_torch_save` can read the folder. Tensors have their full shapes and are stored in chunks.
"""

import io
import os
import pickle
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import IO, Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.utils.serialization import config

from lightning_paral.checkpoint.formats.dcp_metadata import load_metadata
from lightning_paral.checkpoint.io.files import ChecksummedWriter, FileRecord
from lightning_paral.checkpoint.io.tensor_bytes import HostBytes
from lightning_paral.checkpoint.layout import Chunk, coverage_fault
from lightning_paral.checkpoint.lazy_tensor import LazyTensor, StoredChunk
from lightning_paral.checkpoint.safe_load.archive import read_archive
from lightning_paral.checkpoint.safe_load.unpickle import load_safely
from lightning_paral.checkpoint.save_plan import WriteItem
from lightning_paral.checkpoint.storage import Folder, check_range
from lightning_paral.checkpoint.tree import TreePath, insert
from lightning_paral.compat.torch.distributed_checkpoint import StorageInfo, flatten_state_dict
from lightning_paral.errors import CheckpointError

METADATA = ".metadata"
"""Name of the file with the location of each value, in the format of Distributed Checkpoint."""
META = "meta.pt"
"""Name of the file with everything except weights and optimizer state."""
_ALIGNMENT = 64
# Lists may have elements that no path sets, such as empty dicts, which torch drops. The number of such gaps is limited,
# because a hostile path with a large index would otherwise create a huge list.
_GAPS_PER_KEY = 10
_FREE_GAPS = 10_000


# Writing


@dataclass(frozen=True)
class WrittenChunk:
    """The location of a chunk in a rank's file, in bytes."""

    item: int
    """Index of the item that the chunk is a part of."""
    chunk: Chunk
    offset: int
    length: int


@dataclass(frozen=True)
class WrittenFile:
    """The file that one rank has written."""

    name: str
    record: FileRecord
    chunks: list[WrittenChunk]
    objects: dict[TreePath, tuple[int, int]]
    """Offset and length in bytes of each value that is not a tensor."""


def write_rank_file(
    open_file: Callable[[str], ChecksummedWriter], name: str, items: list[WriteItem], objects: dict[TreePath, bytes]
) -> WrittenFile:
    """Write a file with this rank's shards of `items`, and with `objects`: serialized values that are not tensors."""
    chunks, locations = [], {}
    with open_file(name) as file, HostBytes.of(items) as source:
        for number, item in enumerate(items):
            for chunk in item.shard.chunks:
                file.pad(_ALIGNMENT)
                offset = file.position
                _write_chunk(file, chunk, item.dtype, source)
                chunks.append(WrittenChunk(number, chunk, offset, file.position - offset))
        for path, data in objects.items():
            locations[path] = (file.position, len(data))
            file.write(data)
    return WrittenFile(name, file.record(), chunks, locations)


def _write_chunk(file: ChecksummedWriter, chunk: Chunk, dtype: torch.dtype, source: HostBytes) -> None:
    """Write what `torch.save` writes for a tensor of shape `chunk.sizes`, with its data taken from `source`."""
    stand_in = torch.empty(chunk.sizes, dtype=dtype)  # its memory is never touched, so it takes none
    filled = _FilledFile(file, source)
    try:
        with config.patch({"save.compute_crc32": False}), torch.serialization.skip_data():  # type: ignore[attr-defined]
            torch.save(stand_in, cast("IO[bytes]", filled))
    except BaseException:
        if filled.error is not None:
            raise filled.error from None  # torch replaces it by another error
        raise
    assert filled.num_filled == stand_in.nbytes, "torch.save did not seek over the data, as skip_data should make it"


class _FilledFile:
    """A file for `torch.save` under `skip_data`. When torch seeks over the data, this writes bytes of `source`."""

    def __init__(self, file: ChecksummedWriter, source: HostBytes) -> None:
        self._file = file
        self._source = source
        self.write, self.flush = file.write, file.flush
        self.num_filled = 0
        self.error: BaseException | None = None

    def seek(self, nbytes: int, whence: int) -> None:
        """Write the next `nbytes` bytes of the source instead of seeking."""
        assert whence == os.SEEK_CUR
        try:
            for data in self._source.read(nbytes):
                self._file.write(data)
        except BaseException as error:
            self.error = error
            raise
        self.num_filled += nbytes


def serialize_values(values: dict[TreePath, Any]) -> dict[TreePath, bytes]:
    """Return each value as the bytes that `torch.save` writes for it."""
    data = {}
    for path, value in values.items():
        buffer = io.BytesIO()
        torch.save(value, buffer)
        data[path] = buffer.getvalue()
    return data


def flatten(tree: dict[str, Any]) -> dict[TreePath, Any]:
    """Return the leaves of nested dicts and lists by path. The leaves are those of Distributed Checkpoint."""
    flattened, paths = flatten_state_dict(tree)
    return {paths[key]: value for key, value in flattened.items()}


def make_metadata(items: list[WriteItem], written: list[WrittenFile]) -> bytes:
    """Return the content of `.metadata`.

    Raises:
        CheckpointError: the chunks of the ranks leave gaps or overlap, because the ranks saved different values.
    """
    state: dict[str, Any] = {}
    storage: dict[MetadataIndex, Any] = {}
    paths: dict[str, TreePath] = {}
    chunks: list[list[tuple[str, WrittenChunk]]] = [[] for _ in items]
    for file in written:
        for chunk in file.chunks:
            chunks[chunk.item].append((file.name, chunk))
        for path, (offset, length) in file.objects.items():
            key = _key(path)
            paths[key] = path
            state[key] = BytesStorageMetadata()
            storage[MetadataIndex(key)] = StorageInfo(file.name, offset, length)
    for item, found in zip(items, chunks, strict=True):
        fault = coverage_fault(item.shape, [chunk.chunk for _, chunk in found])
        if fault is not None:
            raise CheckpointError(f"The shards of {_key(item.path)} on different ranks do not fit together: {fault}.")
        for path in (item.path, *item.aliases):
            key = _key(path)
            paths[key] = path
            bounds = [(torch.Size(chunk.chunk.offsets), torch.Size(chunk.chunk.sizes)) for _, chunk in found]
            about = [ChunkStorageMetadata(offsets, sizes) for offsets, sizes in bounds]
            state[key] = TensorStorageMetadata(TensorProperties(item.dtype), torch.Size(item.shape), about)
            for number, (name, chunk) in enumerate(found):
                index = MetadataIndex(key, chunk.chunk.offsets, number)
                storage[index] = StorageInfo(name, chunk.offset, chunk.length)
    metadata = Metadata(
        state_dict_metadata=state,
        planner_data=paths,
        storage_data=storage,
        storage_meta=StorageMeta(save_id=str(uuid.uuid4())),
        version=filesystem.CURRENT_DCP_VERSION,
    )
    return pickle.dumps(metadata)


def _key(path: TreePath) -> str:
    return ".".join(map(str, path))


# Reading


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
