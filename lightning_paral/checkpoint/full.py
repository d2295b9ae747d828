"""The full format: one ordinary Lightning file. Rank 0 receives the tensors one by one, and writes each in its turn."""

import io
import os
import pickle
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.serialization import config

from lightning_paral.checkpoint.layout import Chunk, flat_range_of
from lightning_paral.checkpoint.manifest import (
    ChecksummedWriter,
    FileRecord,
    Manifest,
    checksum_of_block,
    embed,
    reader_of,
)
from lightning_paral.checkpoint.optimizer_state import by_int
from lightning_paral.checkpoint.shards import bytes_of, flat
from lightning_paral.checkpoint.tree import Kind, SavedTensor, TreePath, check_shards, replace_at
from lightning_paral.compat.torch.tensors import fake_tensors, identity_of, untyped
from lightning_paral.distributed.exchange import RankGroup


def write_full(
    tree: dict[str, Any],
    tensors: Sequence[SavedTensor],
    path: Path,
    ranks: RankGroup,
    about: dict[str, Any],
    what: str,
    *,
    keyed_by_fqn: bool = False,
) -> int:
    """Write the file `path`: what `torch.save` would write, and a manifest. *Collective* over `ranks`.

    Only rank 0 accesses the file. It receives them into two buffers, of the size of the largest part of other ranks.

    Args:
        tree: the checkpoint. Only rank 0's is used, and not for `tensors`.
        tensors: the tensors of this rank, each with the shard that this rank writes. Rank 0 has all.
        path: the path of the file.
        ranks: the ranks that save together.
        about: the fields of the manifest that do not concern its files.
        what: the action, such as "Saving a.ckpt", for error messages.
        keyed_by_fqn: whether `tree` has optimizer states by FQN, as `by_fqn` makes them.

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
        skeleton = by_int(skeleton) if keyed_by_fqn else skeleton
        storages = {key: storage for key, storage in _storages_in(skeleton).items() if storage.nbytes()}
        at.update({identity_of(fake.untyped_storage()): tensor.paths[0] for tensor, fake in pairs})
        return [at[key] for key in storages if key in at]

    order = ranks.run_on_rank_0(what, lay_out)
    shards = {path: tensor for tensor in tensors for path in tensor.paths}
    local = [shards.get(path) for path in order]
    parts = ranks.gather([_Part(tensor.kind, tensor.shard.chunks) if tensor else None for tensor in local])
    values = ranks.run_on_all(what, lambda: _Gathered(local, parts, ranks))
    error: Exception | None = None
    nbytes = 0
    try:
        if ranks.is_rank_0:
            data = (values.next() if key in at else [_tensor_over(storage)] for key, storage in storages.items())
            nbytes = _write(path, skeleton, data, about)
    except Exception as raised:
        error = raised
    try:
        while values.left:
            values.exchange()
    except Exception as raised:  # of the process group
        error = error or raised
    ranks.run_on_all(what, lambda: _raise(values.error))
    ranks.run_on_all(what, lambda: _raise(error))
    return nbytes


def _raise(error: Exception | None) -> None:
    if error is not None:
        raise error


class _Part(NamedTuple):
    """What one rank writes of a tensor."""

    kind: Kind
    chunks: Sequence[Chunk]

    @property
    def numel(self) -> int:
        return sum(chunk.numel for chunk in self.chunks)


class _Gathered:
    """Sends tensors to rank 0 one by one. All ranks call `exchange` or `next` equally often.

    Rank 0 receives a tensor while it writes the one before, so it has two buffers. A rank that cannot read its values
    sends zeros and keeps the error, so that the others do not wait for it.

    Args:
        local: the tensors, each with what this rank writes of it; `None` for a tensor that it does not have.
        parts: for each rank, what it writes of each tensor.
        ranks: the ranks.

    Raises:
        CheckpointError: on rank 0, the parts of the ranks do not fit together.
    """

    def __init__(
        self, local: Sequence[SavedTensor | None], parts: Sequence[Sequence[_Part | None]], ranks: RankGroup
    ) -> None:
        self._local, self._parts, self._ranks = local, list(zip(*parts, strict=True)), ranks
        self._number = 0
        self._received: dict[int, tuple[Any, Tensor]] | None = None
        self.error: Exception | None = None
        if not ranks.is_rank_0:
            return
        for tensor, of_ranks in zip(local, self._parts, strict=True):
            assert tensor is not None, "rank 0 lists all tensors"
            found = [part for part in of_ranks if part is not None and part.chunks]
            kinds = [tensor.kind, *(part.kind for part in found)]
            check_shards(tensor.name, kinds, [chunk for part in found for chunk in part.chunks])
        remote = [sum(part.numel * part.kind[1].itemsize for part in of[1:] if part) for of in self._parts]
        self._buffers = [torch.empty(max(remote, default=0), dtype=torch.uint8) for _ in range(2)]

    @property
    def left(self) -> int:
        """How many tensors have not been sent."""
        return len(self._local) - self._number

    def next(self) -> list[Tensor]:
        """Return the next tensor, on rank 0, in contiguous pieces that are valid until the next call."""
        tensor = self._local[self._number]
        assert tensor is not None, "rank 0 lists all tensors"
        return _in_order(tensor, self.exchange())

    def exchange(self) -> list[tuple[Chunk, Tensor]]:
        """Return the chunks of the next tensor on rank 0; send this rank's part of it on other ranks."""
        number = self._number
        own = self._read(self._local[number])
        received = self._receive(number) if self._received is None else self._received
        self._number += 1
        if not self._ranks.is_rank_0:
            if own.numel():
                dist.send(own.view(torch.uint8), group=self._ranks.group, group_dst=0)
            return []
        self._received = self._receive(number + 1)
        found: list[tuple[Chunk, Tensor]] = []
        for rank, part in enumerate(self._parts[number]):
            work, values = received.get(rank, (None, own))
            if work is not None:
                work.wait()
            for chunk in part.chunks if part is not None else ():
                found.append((chunk, values[: chunk.numel]))
                values = values[chunk.numel :]
        return found

    def _receive(self, number: int) -> dict[int, tuple[Any, Tensor]]:
        """Start to receive the parts of other ranks. Return, by rank, what to wait for and the values."""
        received: dict[int, tuple[Any, Tensor]] = {}
        if not self._ranks.is_rank_0 or number >= len(self._local):
            return received
        start = 0
        for rank, part in enumerate(self._parts[number]):
            if rank and part is not None and part.chunks:
                dtype = part.kind[1]
                data = self._buffers[number % 2][start : start + part.numel * dtype.itemsize]
                start += len(data)
                received[rank] = dist.irecv(data, group=self._ranks.group, group_src=rank), data.view(dtype)
        return received

    def _read(self, tensor: SavedTensor | None) -> Tensor:
        if tensor is None or not tensor.shard.chunks:
            return torch.empty(0)
        try:
            return flat(tensor.shard.values().to("cpu", tensor.dtype))
        except Exception as error:
            self.error = self.error or error
            return torch.zeros(sum(chunk.numel for chunk in tensor.shard.chunks), dtype=tensor.dtype)


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
            blocks.append((start, nbytes - start, checksum_of_block(reader_of(file.fileno()), start, nbytes - start)))
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
