"""The sharded form: a folder that is an ordinary Distributed Checkpoint, with a file of each rank and `meta.pt`.

Keys and files are those of Lightning's `ModelParallelStrategy`, so that it, `torch.distributed.checkpoint` and
`dcp_to_torch_save` read it: tensors of full shape, in chunks.
"""

import io
import os
import pickle
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO, Any, cast

import torch
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

from lightning_paral.checkpoint.io.checksums import FileRecord
from lightning_paral.checkpoint.io.tensor_bytes import HostBytes
from lightning_paral.checkpoint.io.writer import ChecksummedWriter
from lightning_paral.checkpoint.layout import Chunk, coverage_fault
from lightning_paral.checkpoint.save_plan import TreePath, WriteItem
from lightning_paral.compat.torch.distributed_checkpoint import StorageInfo, flatten_state_dict
from lightning_paral.errors import CheckpointError

METADATA = ".metadata"
META = "meta.pt"
_ALIGNMENT = 64


@dataclass(frozen=True)
class WrittenChunk:
    """Where a chunk of an entry lies in a rank's file."""

    entry: int
    chunk: Chunk
    offset: int
    length: int


@dataclass(frozen=True)
class WrittenFile:
    """What one rank has written."""

    name: str
    record: FileRecord
    chunks: list[WrittenChunk]
    objects: dict[TreePath, tuple[int, int]]
    """Offset and length of each value that is no tensor."""


def write_rank_file(
    open_file: Callable[[str], ChecksummedWriter], name: str, entries: list[WriteItem], objects: dict[TreePath, bytes]
) -> WrittenFile:
    """Write this rank's parts of `entries`, and `objects`, values that are no tensors, already serialized."""
    chunks, places = [], {}
    with open_file(name) as file, HostBytes.of(entries) as source:
        for number, entry in enumerate(entries):
            for chunk in entry.part.chunks:
                file.pad(_ALIGNMENT)
                offset = file.position
                _write_chunk(file, chunk, entry.dtype, source)
                chunks.append(WrittenChunk(number, chunk, offset, file.position - offset))
        for path, data in objects.items():
            places[path] = (file.position, len(data))
            file.write(data)
    return WrittenFile(name, file.record(), chunks, places)


def _write_chunk(file: ChecksummedWriter, chunk: Chunk, dtype: torch.dtype, source: HostBytes) -> None:
    """Write what `torch.save` would write for a tensor of the size of `chunk` that holds the next bytes of `source`."""
    stand_in = torch.empty(chunk.sizes, dtype=dtype)  # never touched
    filled = _Filled(file, source)
    try:
        with config.patch({"save.compute_crc32": False}), torch.serialization.skip_data():  # type: ignore[attr-defined]
            torch.save(stand_in, cast("IO[bytes]", filled))
    except BaseException:
        if filled.error is not None:
            raise filled.error from None  # torch hides it behind an error of its own
        raise
    assert filled.num_filled == stand_in.nbytes, "torch.save has not asked for the data as skip_data says"


class _Filled:
    """A file for `torch.save` that fills in the bytes that it skips from a source."""

    def __init__(self, file: ChecksummedWriter, source: HostBytes) -> None:
        self._file = file
        self._source = source
        self.write, self.flush = file.write, file.flush
        self.num_filled = 0
        self.error: BaseException | None = None

    def seek(self, nbytes: int, whence: int) -> None:
        """Write the next `nbytes` bytes of the source: under `skip_data` torch seeks over them."""
        assert whence == os.SEEK_CUR
        try:
            for data in self._source.read(nbytes):
                self._file.write(data)
        except BaseException as error:
            self.error = error
            raise
        self.num_filled += nbytes


def serialized(values: dict[TreePath, Any]) -> dict[TreePath, bytes]:
    """Return each value as `torch.save` writes it."""
    data = {}
    for path, value in values.items():
        buffer = io.BytesIO()
        torch.save(value, buffer)
        data[path] = buffer.getvalue()
    return data


def flatten(tree: dict[str, Any]) -> dict[TreePath, Any]:
    """Return the leaves of nested dicts and lists by path, as Distributed Checkpoint cuts them."""
    flattened, paths = flatten_state_dict(tree)
    return {paths[key]: value for key, value in flattened.items()}


def make_metadata(entries: list[WriteItem], written: list[WrittenFile]) -> bytes:
    """Return the content of `.metadata`.

    Raises:
        CheckpointError: the ranks' chunks leave holes or overlap, because they did not save the same.
    """
    state: dict[str, Any] = {}
    storage: dict[MetadataIndex, Any] = {}
    paths: dict[str, TreePath] = {}
    chunks: list[list[tuple[str, WrittenChunk]]] = [[] for _ in entries]
    for file in written:
        for chunk in file.chunks:
            chunks[chunk.entry].append((file.name, chunk))
        for path, (offset, length) in file.objects.items():
            key = _key(path)
            paths[key] = path
            state[key] = BytesStorageMetadata()
            storage[MetadataIndex(key)] = StorageInfo(file.name, offset, length)
    for entry, found in zip(entries, chunks, strict=True):
        fault = coverage_fault(entry.shape, [chunk.chunk for _, chunk in found])
        if fault is not None:
            raise CheckpointError(f"The ranks do not agree on {_key(entry.path)}: {fault}.")
        for path in (entry.path, *entry.aliases):
            key = _key(path)
            paths[key] = path
            where = [ChunkStorageMetadata(torch.Size(b.chunk.offsets), torch.Size(b.chunk.sizes)) for _, b in found]
            state[key] = TensorStorageMetadata(TensorProperties(entry.dtype), torch.Size(entry.shape), where)
            for number, (name, b) in enumerate(found):
                index = MetadataIndex(key, b.chunk.offsets, number)
                storage[index] = StorageInfo(name, b.offset, b.length)
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
