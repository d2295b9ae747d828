"""The full format: one ordinary Lightning file. Rank 0 receives the tensors one by one, and writes each in its turn."""

import io
import os
import pickle
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.serialization import config

from lightning_paral.checkpoint.layout import Chunk, flat_range_of
from lightning_paral.checkpoint.manifest import ChecksummedWriter, FileRecord, Manifest, checksum_of_block, embed
from lightning_paral.checkpoint.shards import NO_SHARD, bytes_of, flat
from lightning_paral.checkpoint.tree import SavedTensor, TreePath, check_shards, replace_at
from lightning_paral.compat.torch.tensors import fake_tensors, identity_of, untyped
from lightning_paral.distributed.exchange import RankGroup


def write_full(
    tree: dict[str, Any],
    tensors: Sequence[SavedTensor],
    path: Path,
    ranks: RankGroup,
    about: dict[str, Any],
    what: str,
) -> int:
    """Write the file `path`: what `torch.save` would write, and a manifest. *Collective* over `ranks`.

    Only rank 0 accesses the file. Of the tensors, it has at most two in memory.

    Args:
        tree: the checkpoint. Only rank 0's is used, and not for `tensors`.
        tensors: the tensors of this rank, each with the shard that this rank writes. Rank 0 has all.
        path: the path of the file.
        ranks: the ranks that save together.
        about: the fields of the manifest that do not concern its files.
        what: the action, such as "Saving a.ckpt", for error messages.

    Returns:
        int: the size of the file in bytes on rank 0, otherwise 0.

    Raises:
        CheckpointError: a rank could not read or write, or the shards of the ranks do not fit together. Raised on all
            ranks.
    """
    skeleton: Any = None
    storages: dict[int, torch.UntypedStorage] = {}
    at: dict[int, TreePath] = {}

    def lay_out() -> list[TreePath]:
        nonlocal skeleton, storages
        fakes = fake_tensors((tensor.shape, tensor.dtype) for tensor in tensors)
        pairs = list(zip(tensors, fakes, strict=True))
        skeleton = replace_at(tree, {path: fake for tensor, fake in pairs for path in tensor.paths})
        storages = {key: storage for key, storage in _storages_in(skeleton).items() if storage.nbytes()}
        at.update({identity_of(fake.untyped_storage()): tensor.paths[0] for tensor, fake in pairs})
        return [at[key] for key in storages if key in at]

    order = ranks.run_on_rank_0(what, lay_out)
    by_path = {path: tensor for tensor in tensors for path in tensor.paths}
    own = [by_path.get(path, _ABSENT) for path in order]
    by_rank = ranks.gather([(tensor.kind, tensor.shard.chunks) for tensor in own])
    parts = [[part for part in of_tensor if part[1]] for of_tensor in zip(*by_rank, strict=True)]

    def check() -> None:
        for tensor, found in zip(own, parts, strict=True):
            kinds = [tensor.kind, *(kind for kind, _ in found)]
            check_shards(tensor.name, kinds, [chunk for _, chunks in found for chunk in chunks])

    ranks.run_on_rank_0(what, check)
    faults: list[Exception] = []
    values = _gathered(own, by_rank, ranks, faults) if ranks.is_rank_0 else iter(())
    nbytes = 0
    try:
        if ranks.is_rank_0:
            data = (next(values) if key in at else [_tensor_over(storage)] for key, storage in storages.items())
            nbytes = _write(path, skeleton, data, about)
        else:
            _send(own, ranks, faults)
    except Exception as error:
        faults.append(error)
    for _ in values:  # what other ranks still send
        pass

    def succeed() -> None:
        if faults:
            raise faults[0]

    ranks.run_on_all(what, succeed)
    return nbytes


_ABSENT = SavedTensor((), (), torch.uint8, NO_SHARD)
"""Stands for a tensor that a rank does not have."""


def _send(tensors: Sequence[SavedTensor], ranks: RankGroup, faults: list[Exception]) -> None:
    """Send this rank's part of each tensor to rank 0: zeros if it cannot be read, with the error in `faults`."""
    for tensor in tensors:
        if tensor.shard.chunks:
            try:
                values = _local(tensor)
            except Exception as error:
                faults.append(error)
                values = torch.zeros(sum(chunk.numel for chunk in tensor.shard.chunks), dtype=tensor.dtype)
            dist.send(values.view(torch.uint8), group=ranks.group, group_dst=0)


def _gathered(
    tensors: Sequence[SavedTensor], by_rank: Sequence[Any], ranks: RankGroup, faults: list[Exception]
) -> Iterator[list[Tensor]]:
    """Yield each tensor on rank 0, in contiguous pieces in row-major order; none if it cannot be read.

    What the other ranks have of a tensor is received while the tensor before it is written, in two buffers by turns.
    """
    remote = list(zip(*by_rank[1:], strict=True))
    sizes = [[sum(chunk.numel for chunk in chunks) * kind[1].itemsize for kind, chunks in parts] for parts in remote]
    buffers = [torch.empty(max(map(sum, sizes), default=0), dtype=torch.uint8) for _ in range(2)]

    def post(number: int) -> list[tuple[Any, Sequence[Chunk], Tensor]]:
        posted = []
        left = buffers[number % 2]
        for rank, ((_, dtype), chunks) in enumerate(remote[number] if number < len(remote) else (), 1):
            data, left = left.tensor_split((sizes[number][rank - 1],))
            if chunks:
                posted.append((dist.irecv(data, group=ranks.group, group_src=rank), chunks, data.view(dtype)))
        return posted

    ahead = post(0)
    for number, tensor in enumerate(tensors):
        posted, ahead = ahead, post(number + 1)
        found: list[tuple[Chunk, Tensor]] = []
        for work, chunks, values in posted:
            work.wait()
            found += _by_chunk(chunks, values)
        try:
            found += _by_chunk(tensor.shard.chunks, _local(tensor)) if tensor.shard.chunks else []
            pieces = _in_order(tensor, found)
        except Exception as error:
            faults.append(error)
            pieces = []
        yield pieces


def _local(tensor: SavedTensor) -> Tensor:
    return flat(tensor.shard.values().to("cpu", tensor.dtype))


def _by_chunk(chunks: Sequence[Chunk], values: Tensor) -> list[tuple[Chunk, Tensor]]:
    parts: Any = torch.split(values, [chunk.numel for chunk in chunks])
    return list(zip(chunks, parts, strict=True))


def _in_order(tensor: SavedTensor, found: list[tuple[Chunk, Tensor]]) -> list[Tensor]:
    """Return the values of all chunks of a tensor in row-major order; copied if a chunk is no flat range."""
    ranges = [(flat_range_of(tensor.shape, chunk), values) for chunk, values in found]
    if all(at is not None for at, _ in ranges):
        return [values for _, values in sorted(ranges, key=lambda pair: pair[0] or (0, 0))]
    full = torch.empty(tensor.shape, dtype=tensor.dtype)
    for chunk, values in found:
        full[chunk.index] = values.view(chunk.sizes)
    return [full]


def _write(path: Path, skeleton: Any, data: Iterator[list[Tensor]], about: dict[str, Any]) -> int:
    """Write the file with the next of `data` as each of its storages, and the manifest. Return its size in bytes."""
    without_crc = config.patch({"save.compute_crc32": False})  # type: ignore[attr-defined]
    skipping = torch.serialization.skip_data(materialize_fake_tensors=True)
    with ChecksummedWriter(open(path, "wb", buffering=2**20), on_disk=True) as file:
        filled = _FilledFile(file, data, skipping)
        try:
            with without_crc, skipping:
                torch.save(skeleton, cast("IO[bytes]", filled))
        except RuntimeError as error:  # torch hides what went wrong
            raise filled.error or file.error or error from None
    embed(path, lambda nbytes: Manifest(files={".": _first(file.record(), nbytes, path)}, **about))
    return path.stat().st_size


class _FilledFile:
    """A file for `torch.save` under `skip_data`: where torch seeks past the data of a storage, this writes the data."""

    def __init__(self, file: ChecksummedWriter, data: Iterator[list[Tensor]], skipping: Any) -> None:
        self._file, self._data, self._skipping = file, data, skipping
        self.write, self.flush = file.write, file.flush
        self.error: BaseException | None = None

    def seek(self, nbytes: int, whence: int) -> None:
        """Write the next storage."""
        try:
            self._skipping.__exit__(None, None, None)  # reading a tensor may load it, and would skip its data as well
            try:
                pieces = [bytes_of(piece) for piece in next(self._data)]
            finally:
                self._skipping.__enter__()
            sizes = (os.SEEK_CUR, sum(map(len, pieces)))
            assert (whence, nbytes) == sizes, "torch.save writes storages in another order"
            for piece in pieces:
                self._file.write(piece)
        except BaseException as error:
            self.error = error
            raise


def _first(record: FileRecord, nbytes: int, path: Path) -> FileRecord:
    """Return the record of the first `nbytes` bytes of the file. Only the block in which they end is read again."""
    blocks = [block for block in record.blocks if block[0] + block[1] <= nbytes]
    start = sum(length for _, length, _ in blocks)
    if start < nbytes:
        with open(path, "rb", buffering=0) as file:
            blocks.append((start, nbytes - start, checksum_of_block(file, start, nbytes - start)))
    return FileRecord(bytes=nbytes, blocks=blocks)


def _tensor_over(storage: Any) -> Tensor:
    """Return the bytes of a storage as a tensor on the host."""
    return torch.empty(0, dtype=torch.uint8).set_(storage.cpu())


def _storages_in(tree: Any) -> dict[int, torch.UntypedStorage]:
    """Return the storages in `tree` by their identity, in the order in which `torch.save` writes them."""
    finder = _StorageFinder(io.BytesIO(), protocol=torch.serialization.DEFAULT_PROTOCOL)
    with torch.serialization.skip_data(materialize_fake_tensors=True):
        finder.dump(tree)
    return finder.found


class _StorageFinder(pickle.Pickler):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.found: dict[int, torch.UntypedStorage] = {}

    def persistent_id(self, obj: Any) -> Any:
        storage = untyped(obj)
        if storage is None:
            return None
        self.found.setdefault(identity_of(storage), storage)
        return "storage"
