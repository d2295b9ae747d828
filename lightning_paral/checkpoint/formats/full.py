"""The full format: one ordinary Lightning file, to which every rank writes its shards. No rank needs the full state."""

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

from lightning_paral.checkpoint.io.files import BackgroundFsync, FileRecord, blocks_of, checksum_of_block, reader_of
from lightning_paral.checkpoint.io.tensor_bytes import HostBytes
from lightning_paral.checkpoint.layout import Chunk
from lightning_paral.checkpoint.manifest import Manifest, embed
from lightning_paral.checkpoint.safe_load.archive import check_regular
from lightning_paral.checkpoint.safe_load.unpickle import load_safely
from lightning_paral.checkpoint.save_plan import WriteItem
from lightning_paral.checkpoint.shards import bytes_of, flat
from lightning_paral.checkpoint.tree import replace_at
from lightning_paral.compat.torch.files import record_offset
from lightning_paral.compat.torch.tensors import fake_tensors, identity_of, untyped
from lightning_paral.distributed.exchange import RankGroup
from lightning_paral.errors import CheckpointError


def write_full(
    tree: dict[str, Any], items: list[WriteItem], path: Path, ranks: RankGroup, about: dict[str, Any], what: str
) -> int:
    """Write the new file `path`: what `torch.save` would write, and a manifest. *Collective* over `ranks`.

    Args:
        tree: the checkpoint. Only rank 0's is used, for everything except the tensors of `items`.
        items: the tensors, each with the shard that this rank writes.
        path: the path of the file. Ranks that do not see the file, because the file system is not shared, send their
            shards to rank 0.
        ranks: the ranks that save together.
        about: the fields of the manifest that do not concern its files.
        what: the action, such as "Saving a.ckpt", for error messages.

    Returns:
        int: the size of the file in bytes.

    Raises:
        CheckpointError: a rank could not write. Raised on all ranks.
    """
    offsets = ranks.run_on_rank_0(what, lambda: write_skeleton(tree, items, path))
    visible = ranks.gather(path.exists())
    ranks.gather_results(what, lambda: _write_shards(items, offsets, path) if visible[ranks.rank] else None)
    if not all(visible):
        _write_shards_of_others(items, offsets, path, ranks, visible, what)
    readers = [rank for rank in range(ranks.world_size) if visible[rank]]
    sums = ranks.gather_results(what, lambda: _checksums(path, readers, ranks.rank) if visible[ranks.rank] else {})

    def finish() -> int:
        embed(path, lambda nbytes: Manifest(files={".": _record(path, nbytes, sums)}, **about))
        return path.stat().st_size

    return ranks.run_on_rank_0(what, finish)


def write_skeleton(tree: dict[str, Any], items: list[WriteItem], path: Path) -> list[int]:
    """Write the file with zeros instead of the data of `items`, and return the byte offset of the data of each item."""
    fakes = fake_tensors((item.shape, item.dtype) for item in items)
    fake_at = {at: fake for item, fake in zip(items, fakes, strict=True) for at in (item.path, *item.aliases)}
    skeleton = replace_at(tree, fake_at)
    with torch.serialization.skip_data(materialize_fake_tensors=True):
        try:
            torch.save(skeleton, path)
        except RuntimeError:
            _raise_os_error(path)
            raise
        finder = _StorageFinder(io.BytesIO(), protocol=torch.serialization.DEFAULT_PROTOCOL)
        finder.dump(skeleton)
    # torch.save has skipped the data of all storages. Here, only the data of those that are not in `items` is written.
    offset_of = record_offset(path)
    starts = {data: offset_of(f"data/{number}") for number, data in enumerate(finder.found)}
    offsets = [starts[identity_of(fake.untyped_storage())] for fake in fakes]
    with open(path, "r+b") as file:
        for data, storage in finder.found.items():
            if starts[data] not in set(offsets) and storage.nbytes():
                file.seek(starts[data])
                file.write(bytes_of(_tensor_over(storage)))
    return offsets


def _raise_os_error(path: Path) -> None:
    """Write to the file with plain I/O, to raise the `OSError` that `torch.save` hides behind a `RuntimeError`."""
    with open(path, "ab", buffering=0) as file:
        file.write(bytes(2**16))
        os.fsync(file.fileno())


def _tensor_over(storage: Any) -> Tensor:
    """Return the bytes of a storage as a tensor on the host."""
    values = torch.empty(0, dtype=torch.uint8)
    values.set_(storage.cpu())
    return values


class _StorageFinder(pickle.Pickler):
    """Collects the storages in an object, in the order in which `torch.save` numbers them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.found: dict[int, torch.UntypedStorage] = {}

    def persistent_id(self, obj: Any) -> Any:
        storage = untyped(obj)
        if storage is None:
            return None
        self.found.setdefault(identity_of(storage), storage)
        return "storage"


def _write_shards(items: list[WriteItem], offsets: list[int], path: Path) -> None:
    """Write this rank's shards of `items` to the file, and wait until they are on disk."""
    descriptor = os.open(path, os.O_WRONLY)
    try:
        with BackgroundFsync(descriptor) as fsync:
            with HostBytes.of(items) as source:
                for item, offset in zip(items, offsets, strict=True):
                    _write_chunks(descriptor, item, offset, item.shard.chunks, source)
                    fsync.wrote(sum(chunk.numel for chunk in item.shard.chunks) * item.dtype.itemsize)
            fsync.finish()
    finally:
        os.close(descriptor)


def _write_chunks(descriptor: int, item: WriteItem, offset: int, chunks: Sequence[Chunk], source: HostBytes) -> None:
    """Write the next bytes of `source` to the positions of `chunks`, for a tensor that begins at byte `offset`."""
    for chunk in chunks:
        for start, nbytes in _byte_ranges(item.shape, item.dtype.itemsize, chunk):
            position = offset + start
            for data in source.read(nbytes):
                write_all(descriptor, data, position)
                position += len(data)


def _byte_ranges(shape: tuple[int, ...], itemsize: int, chunk: Chunk) -> Iterator[tuple[int, int]]:
    """Yield the offset and length in bytes of each contiguous range of `chunk` within the tensor, in order."""
    strides = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
    start = sum(at * stride for at, stride in zip(chunk.offsets, strides, strict=True))
    # Trailing dimensions that the chunk spans fully are contiguous with the dimension before them. Each index of the
    # remaining dimensions except the last begins a range.
    num_outer = len(shape)
    while num_outer and chunk.sizes[num_outer - 1] == shape[num_outer - 1]:
        num_outer -= 1
    outer = chunk.sizes[: max(0, num_outer - 1)]
    nbytes = chunk.numel // max(1, prod(outer)) * itemsize
    for index in product(*map(range, outer)):
        position = start + sum(at * stride for at, stride in zip(index, strides, strict=False))
        yield position * itemsize, nbytes


def write_all(descriptor: int, data: memoryview, offset: int) -> None:
    """Write all of `data` at byte `offset` of a file."""
    while len(data):
        written = os.pwrite(descriptor, data[: 2**30], offset)
        data, offset = data[written:], offset + written


def _write_shards_of_others(
    items: list[WriteItem], offsets: list[int], path: Path, ranks: RankGroup, visible: list[bool], what: str
) -> None:
    """Send the shards of ranks that do not see the file to rank 0, one tensor at a time. Rank 0 writes them.

    *Collective* over `ranks`.
    """
    for item, offset in zip(items, offsets, strict=True):
        must_send = item.shard.chunks and not visible[ranks.rank]
        local = (item.shard.chunks, item.shard.values().cpu()) if must_send else None
        received: list[Any] | None = [None] * ranks.world_size if ranks.is_rank_0 else None
        first = dist.get_global_rank(ranks.group, 0) if ranks.group else 0
        dist.gather_object(local, received, dst=first, group=ranks.group)

        def write(received: list[Any] | None = received, item: WriteItem = item, offset: int = offset) -> None:
            with open(path, "r+b") as file:
                for chunks, values in filter(None, received or ()):
                    with HostBytes([flat(values.to(item.dtype))]) as source:
                        _write_chunks(file.fileno(), item, offset, chunks, source)
                os.fsync(file.fileno())

        ranks.run_on_rank_0(what, write)


def _checksums(path: Path, readers: list[int], rank: int) -> dict[int, int]:
    """Return the checksums of this rank's blocks of the file, by block number. `readers` take the blocks in turn."""
    mine = list(enumerate(blocks_of(path.stat().st_size)))[readers.index(rank) :: len(readers)]
    with open(path, "rb", buffering=0) as file:
        return {
            number: checksum_of_block(reader_of(file.fileno()), offset, length) for number, (offset, length) in mine
        }


def _record(path: Path, nbytes: int, sums: list[dict[int, int]]) -> FileRecord:
    """Return the record of the first `nbytes` bytes of the file. Only the block in which they end is read again."""
    totals = {number: total for rank_sums in sums for number, total in rank_sums.items()}
    blocks = []
    with open(path, "rb", buffering=0) as file:
        written_blocks = blocks_of(path.stat().st_size)
        for number, (offset, length) in enumerate(blocks_of(nbytes)):
            unchanged = written_blocks[number] == (offset, length) and offset + length <= nbytes
            total = totals[number] if unchanged else checksum_of_block(reader_of(file.fileno()), offset, length)
            blocks.append((offset, length, total))
    return FileRecord(bytes=nbytes, blocks=blocks)


def read_full(path: str | Path, weights_only: bool = True) -> dict[str, Any]:
    """Return the checkpoint in the file at `path`, with memory-mapped tensors.

    Args:
        path: the path of the file.
        weights_only: `False` trusts the checkpoint and runs code in it.

    Raises:
        CheckpointError: the file is damaged or not a checkpoint, or it contains code and `weights_only` is `True`.
    """
    check_regular(path, os.stat(path).st_mode)
    loaded = load_safely(path, weights_only=weights_only, mmap=True)
    if not isinstance(loaded, Mapping):
        raise CheckpointError(f"{path} contains a {type(loaded).__name__}, not a checkpoint.")
    return dict(loaded)
