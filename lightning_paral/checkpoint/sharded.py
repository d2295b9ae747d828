"""The sharded format: a folder that is an ordinary Distributed Checkpoint, with one file per rank and `meta.pt`.

Keys and file names are those of Lightning's `ModelParallelStrategy`. That strategy, `torch.distributed.checkpoint` and
`dcp_to_torch_save` can read the folder. Tensors have their full shapes and are stored in chunks.

`torch.distributed.checkpoint.save` would write the same. It takes up to 1.6 times as long, because it computes a CRC of
each record and flushes a file only at its end, and in torch 2.13 it keeps all tensors that it copies for a file.
"""

import io
import pickle
import uuid
from collections.abc import Iterator, Mapping, Sequence
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

from lightning_paral.checkpoint.layout import Chunk
from lightning_paral.checkpoint.manifest import FileRecord
from lightning_paral.checkpoint.shards import alone, flat
from lightning_paral.checkpoint.storage import Folder
from lightning_paral.checkpoint.tree import Kind, SavedTensor, TreePath, check_shards, name_of
from lightning_paral.compat.torch.distributed_checkpoint import StorageInfo

_ALIGNMENT = 64


@dataclass(frozen=True)
class WrittenTensor:
    """The chunks of a tensor that one rank has written."""

    paths: tuple[TreePath, ...]
    kind: Kind
    chunks: list[tuple[Chunk, int, int]]
    """Each chunk with its offset and length in the file, in bytes."""


@dataclass(frozen=True)
class WrittenFile:
    """The file that one rank has written."""

    name: str
    record: FileRecord
    tensors: list[WrittenTensor]
    objects: dict[TreePath, tuple[int, int]]
    """Offset and length in bytes of each value that is not a tensor."""


def write_rank_file(
    folder: Folder,
    name: str,
    tensors: Sequence[SavedTensor],
    objects: Mapping[TreePath, bytes],
    *,
    lists_all: bool,
) -> WrittenFile:
    """Write a file with this rank's shards of `tensors`, and with `objects`: serialized values that are not tensors.

    With `lists_all`, the result has also the tensors of which this rank writes nothing, so that none is forgotten.
    """
    written, locations = [], {}
    with folder.create(name) as file:
        for tensor in tensors:
            chunks = []
            for chunk, values in _values(tensor):
                file.pad(_ALIGNMENT)
                offset = file.position
                with config.patch({"save.compute_crc32": False}):  # type: ignore[attr-defined]
                    torch.save(values, cast("IO[bytes]", file))
                chunks.append((chunk, offset, file.position - offset))
            if chunks or lists_all:
                written.append(WrittenTensor(tensor.paths, tensor.kind, chunks))
        for path, data in objects.items():
            locations[path] = (file.position, len(data))
            file.write(data)
    return WrittenFile(name, file.record(), written, locations)


def _values(tensor: SavedTensor) -> Iterator[tuple[Chunk, Tensor]]:
    """Yield the chunks that this rank writes, each with its values on the host, in a storage that has nothing else."""
    if not tensor.shard.chunks:
        return
    local, start = flat(tensor.shard.values().to("cpu", tensor.dtype)), 0
    for chunk in tensor.shard.chunks:
        yield chunk, alone(local[start : start + chunk.numel]).view(chunk.sizes)
        start += chunk.numel


def serialize_values(values: Mapping[TreePath, Any]) -> dict[TreePath, bytes]:
    """Return each value as the bytes that `torch.save` writes for it."""
    data = {}
    for path, value in values.items():
        buffer = io.BytesIO()
        torch.save(value, buffer)
        data[path] = buffer.getvalue()
    return data


def leaves(tree: Any, path: TreePath = ()) -> Iterator[tuple[TreePath, Any]]:
    """Yield the leaves of nested dicts and lists, each with its path. They are those of Distributed Checkpoint."""
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from leaves(value, (*path, key))
    elif isinstance(tree, list) and any(isinstance(value, Mapping | list | Tensor) for value in tree):
        for number, value in enumerate(tree):
            yield from leaves(value, (*path, number))
    else:
        yield path, tree


def make_metadata(written: Sequence[WrittenFile]) -> bytes:
    """Return the content of `.metadata`, given the file of each rank.

    Raises:
        CheckpointError: the chunks of the ranks leave gaps or overlap, because the ranks saved different values.
    """
    state: dict[str, Any] = {}
    kinds: dict[str, list[Kind]] = {}
    storage: dict[MetadataIndex, Any] = {}
    paths: dict[str, TreePath] = {}
    for file in written:
        for path, (offset, length) in file.objects.items():
            key = name_of(path)
            paths[key], state[key] = path, BytesStorageMetadata()
            storage[MetadataIndex(key)] = StorageInfo(file.name, offset, length)
        for tensor in file.tensors:
            shape, dtype = tensor.kind
            for path in tensor.paths:
                key = name_of(path)
                paths[key] = path
                kinds.setdefault(key, []).append(tensor.kind)
                about = state.setdefault(key, TensorStorageMetadata(TensorProperties(dtype), torch.Size(shape), []))
                for chunk, offset, length in tensor.chunks:
                    offsets = torch.Size(chunk.offsets)
                    storage[MetadataIndex(key, offsets, len(about.chunks))] = StorageInfo(file.name, offset, length)
                    about.chunks.append(ChunkStorageMetadata(offsets, torch.Size(chunk.sizes)))
    for key, found in kinds.items():
        check_shards(key, found, [Chunk(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in state[key].chunks])
    metadata = Metadata(
        state_dict_metadata=state,
        planner_data=paths,
        storage_data=storage,
        storage_meta=StorageMeta(save_id=str(uuid.uuid4())),
        version=filesystem.CURRENT_DCP_VERSION,
    )
    return pickle.dumps(metadata)
