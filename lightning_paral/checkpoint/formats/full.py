"""The full form: one ordinary Lightning file, into which every rank writes its part. Nobody holds all of it."""

import io
import os
import pickle
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_paral.checkpoint.io.checksums import FileRecord, blocks_of, checksum_of_block, reader_of
from lightning_paral.checkpoint.io.tensor_bytes import HostBytes
from lightning_paral.checkpoint.io.writeback import BackgroundFsync
from lightning_paral.checkpoint.layout import Chunk
from lightning_paral.checkpoint.manifest import Manifest, embed
from lightning_paral.checkpoint.safe_load.archive import check_regular
from lightning_paral.checkpoint.safe_load.unpickle import load_safely
from lightning_paral.checkpoint.save_plan import WriteItem, replace
from lightning_paral.checkpoint.shards import bytes_of, flat
from lightning_paral.compat.torch.archives import record_offset
from lightning_paral.compat.torch.fake_tensors import fake_tensors
from lightning_paral.compat.torch.storages import identity_of, untyped
from lightning_paral.distributed.agreement import RankGroup
from lightning_paral.errors import CheckpointError


def write_full(
    tree: dict[str, Any], entries: list[WriteItem], path: Path, ranks: RankGroup, about: dict[str, Any], what: str
) -> None:
    """Write `tree` to the new file `path`: what `torch.save` would, and a manifest. *Collective* over `ranks`.

    Args:
        tree: the checkpoint; rank 0's counts for all that is not an entry.
        entries: the tensors of which ranks write parts.
        path: on a file system that all ranks share; parts of ranks that do not see it go through rank 0.
        ranks: who writes.
        about: fields of the manifest.
        what: what errors say that failed.
    """
    offsets = ranks.on_first(what, lambda: write_skeleton(tree, entries, path))
    visible = ranks.gather(path.exists())
    ranks.agree(what, lambda: _write_parts(entries, offsets, path) if visible[ranks.rank] else None)
    if not all(visible):
        _write_parts_of_others(entries, offsets, path, ranks, visible, what)
    seeing = [rank for rank in range(ranks.world_size) if visible[rank]]
    sums = ranks.agree(what, lambda: _checksums(path, seeing, ranks.rank) if visible[ranks.rank] else {})

    def finish() -> None:
        embed(path, lambda nbytes: Manifest(files={".": _record(path, nbytes, sums)}, **about))

    ranks.on_first(what, finish)


def write_skeleton(tree: dict[str, Any], entries: list[WriteItem], path: Path) -> list[int]:
    """Write the file with holes where the entries' data belong; return the offset of each."""
    fakes = fake_tensors((entry.shape, entry.dtype) for entry in entries)
    at = {where: fake for entry, fake in zip(entries, fakes, strict=True) for where in (entry.path, *entry.aliases)}
    skeleton = replace(tree, at)
    with torch.serialization.skip_data(materialize_fake_tensors=True):
        try:
            torch.save(skeleton, path)
        except RuntimeError:
            _try_to_write(path)  # torch does not say what the system said
            raise
        finder = _StorageFinder(io.BytesIO(), protocol=torch.serialization.DEFAULT_PROTOCOL)
        finder.dump(skeleton)
    offset_of = record_offset(path)
    place = {data: offset_of(f"data/{number}") for number, data in enumerate(finder.found)}
    offsets = [place[identity_of(fake.untyped_storage())] for fake in fakes]
    with open(path, "r+b") as file:
        for data, storage in finder.found.items():
            if place[data] not in set(offsets) and storage.nbytes():
                file.seek(place[data])
                file.write(bytes_of(_tensor_over(storage)))
    return offsets


def _try_to_write(path: Path) -> None:
    """Write to a file that could not be written, so that the system says why, by an OSError."""
    with open(path, "ab", buffering=0) as file:
        file.write(bytes(2**16))
        os.fsync(file.fileno())


def _tensor_over(storage: Any) -> Tensor:
    values = torch.empty(0, dtype=torch.uint8)
    values.set_(storage.cpu())
    return values


class _StorageFinder(pickle.Pickler):
    """Finds the storages in an object in the order in which `torch.save` numbers them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.found: dict[int, torch.UntypedStorage] = {}

    def persistent_id(self, obj: Any) -> Any:
        storage = untyped(obj)
        if storage is None:
            return None
        self.found.setdefault(identity_of(storage), storage)
        return "storage"


def _write_parts(entries: list[WriteItem], offsets: list[int], path: Path) -> None:
    descriptor = os.open(path, os.O_WRONLY)
    try:
        with BackgroundFsync(descriptor) as flushing:
            with HostBytes.of(entries) as source:
                for entry, offset in zip(entries, offsets, strict=True):
                    write_part(descriptor, entry, offset, entry.part.chunks, source)
                    flushing.wrote(sum(chunk.numel for chunk in entry.part.chunks) * entry.dtype.itemsize)
            flushing.finish()
    finally:
        os.close(descriptor)


def write_part(descriptor: int, entry: WriteItem, offset: int, chunks: Sequence[Chunk], source: HostBytes) -> None:
    """Write the next bytes of `source` to boxes of a tensor whose data begins at byte `offset` of the file."""
    for chunk in chunks:
        for start, nbytes in _stretches(entry.shape, entry.dtype.itemsize, chunk):
            position = offset + start
            for data in source.read(nbytes):
                write_all(descriptor, data, position)
                position += len(data)


def _stretches(shape: tuple[int, ...], itemsize: int, chunk: Chunk) -> Iterator[tuple[int, int]]:
    """Yield the offset and length in bytes of each contiguous range of `chunk` within the tensor, in order."""
    strides = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
    start = sum(at * stride for at, stride in zip(chunk.offsets, strides, strict=True))
    num_outer = len(shape)  # dimensions before the last that is cut: each index of them begins a stretch of the file
    while num_outer and chunk.sizes[num_outer - 1] == shape[num_outer - 1]:
        num_outer -= 1
    outer = chunk.sizes[: max(0, num_outer - 1)]
    nbytes = chunk.numel // max(1, prod(outer)) * itemsize
    for index in product(*map(range, outer)):
        position = start + sum(at * stride for at, stride in zip(index, strides, strict=False))
        yield position * itemsize, nbytes


def write_all(descriptor: int, data: memoryview, offset: int) -> None:
    """Write `data` at byte `offset` of a file."""
    while len(data):
        written = os.pwrite(descriptor, data[: 2**30], offset)
        data, offset = data[written:], offset + written


def _write_parts_of_others(
    entries: list[WriteItem], offsets: list[int], path: Path, ranks: RankGroup, visible: list[bool], what: str
) -> None:
    """Send the parts of ranks that do not see the file to rank 0, one tensor at a time."""
    for entry, offset in zip(entries, offsets, strict=True):
        mine = (entry.part.chunks, entry.part.values().cpu()) if entry.part.chunks and not visible[ranks.rank] else None
        parts: list[Any] | None = [None] * ranks.world_size if ranks.is_first else None
        first = dist.get_global_rank(ranks.group, 0) if ranks.group else 0
        dist.gather_object(mine, parts, dst=first, group=ranks.group)

        def write(parts: list[Any] | None = parts, entry: WriteItem = entry, offset: int = offset) -> None:
            with open(path, "r+b") as file:
                for chunks, values in filter(None, parts or ()):
                    with HostBytes([flat(values.to(entry.dtype))]) as source:
                        write_part(file.fileno(), entry, offset, chunks, source)
                os.fsync(file.fileno())

        ranks.on_first(what, write)


def _checksums(path: Path, seeing: list[int], rank: int) -> dict[int, int]:
    """Return the checksums of this rank's share of the blocks, by their number."""
    mine = list(enumerate(blocks_of(path.stat().st_size)))[seeing.index(rank) :: len(seeing)]
    with open(path, "rb", buffering=0) as file:
        return {
            number: checksum_of_block(reader_of(file.fileno()), offset, length) for number, (offset, length) in mine
        }


def _record(path: Path, nbytes: int, sums: list[dict[int, int]]) -> FileRecord:
    """Return the record of the first `nbytes` bytes; only the block they end in is read again."""
    by_number = {number: total for part in sums for number, total in part.items()}
    blocks = []
    with open(path, "rb", buffering=0) as file:
        whole_blocks = blocks_of(path.stat().st_size)
        for number, (offset, length) in enumerate(blocks_of(nbytes)):
            unchanged = whole_blocks[number] == (offset, length) and offset + length <= nbytes
            total = by_number[number] if unchanged else checksum_of_block(reader_of(file.fileno()), offset, length)
            blocks.append((offset, length, total))
    return FileRecord(bytes=nbytes, blocks=blocks)


def read_full(path: str | Path, weights_only: bool = True) -> dict[str, Any]:
    """Return the checkpoint with tensors mapped from the file, not read."""
    check_regular(path, os.stat(path).st_mode)
    loaded = load_safely(path, weights_only=weights_only, mmap=True)
    if not isinstance(loaded, Mapping):
        raise CheckpointError(f"{path} holds a {type(loaded).__name__}, not a checkpoint.")
    return dict(loaded)
