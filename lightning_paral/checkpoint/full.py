"""The full format: one ordinary Lightning file. Rank 0 receives each tensor in turn, and writes it before the next."""

import io
import os
import pickle
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.utils.serialization import config

from lightning_paral.checkpoint.checksums import ChecksummedWriter, FileRecord, checksum_of_block, reader_of
from lightning_paral.checkpoint.fqn_keys import by_int
from lightning_paral.checkpoint.layout import Chunk
from lightning_paral.checkpoint.manifest import Manifest, embed
from lightning_paral.checkpoint.saved_tensors import Kind, SavedTensor, check_shards
from lightning_paral.checkpoint.shards import bytes_of, flat
from lightning_paral.checkpoint.tree import TreePath, replace_at
from lightning_paral.compat.torch.tensors import fake_tensors, identity_of, untyped
from lightning_paral.distributed.exchange import RankGroup
from lightning_paral.errors import CheckpointError


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

    Only rank 0 accesses the file. It never holds more than one tensor of other ranks.

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
    by_path = {path: tensor for tensor in tensors for path in tensor.paths}
    values = _Gathered([by_path.get(path) for path in order], ranks)
    error: Exception | None = None
    nbytes = 0
    try:
        if ranks.is_rank_0:
            data = (values.next() if key in at else _tensor_over(storage) for key, storage in storages.items())
            nbytes = _write(path, skeleton, data, about)
    except Exception as raised:
        error = raised
    values.skip()

    ranks.run_on_all(what, lambda: _raise(values.error))
    ranks.run_on_all(what, lambda: _raise(error))
    return nbytes


def _raise(error: Exception | None) -> None:
    if error is not None:
        raise error


class _Gathered:
    """Gathers tensors on rank 0 one by one. All ranks call `next` equally often. The constructor is *collective*.

    A rank that cannot read its values sends nothing and keeps the error, so that the others do not wait for it.

    Args:
        tensors: the tensors, each with what this rank writes of it; `None` for a tensor that this rank does not have.
        ranks: the ranks.
    """

    def __init__(self, tensors: Sequence[SavedTensor | None], ranks: RankGroup) -> None:
        has_part = ranks.gather([tensor is not None and bool(tensor.shard.chunks) for tensor in tensors])[1:]
        remote = [any(of_rank[number] for of_rank in has_part) for number in range(len(tensors))]
        self._left = list(zip(tensors, remote, strict=True))[::-1]
        self._ranks = ranks
        self.error: Exception | None = None

    def next(self) -> Tensor:
        """Return the next tensor, in host memory, on rank 0; send this rank's part of it on other ranks.

        Raises:
            CheckpointError: on rank 0, the parts of the ranks do not fit together.
        """
        tensor, is_remote = self._left.pop()
        own = self._read(tensor)
        others = self._ranks.gather_on_rank_0(None if self._ranks.is_rank_0 else own) if is_remote else []
        if not self._ranks.is_rank_0:
            return torch.empty(0)
        assert tensor is not None, "rank 0 lists all tensors"
        parts = [part for part in (own, *others) if part is not None]
        chunks = [chunk for part in parts for chunk in part.chunks]
        check_shards(tensor.name, [part.kind for part in parts] or [tensor.kind], chunks)
        if not is_remote:
            return parts[0].tensor()
        full = torch.empty(tensor.shape, dtype=tensor.dtype)
        for part in parts:
            values, start = part.tensor(), 0
            for chunk in part.chunks:
                full[chunk.index] = values[start : start + chunk.numel].view(chunk.sizes)
                start += chunk.numel
        return full

    def _read(self, tensor: SavedTensor | None) -> "_Part | None":
        if tensor is None or not tensor.shard.chunks:
            return None
        try:
            values = flat(tensor.shard.values().to("cpu", tensor.dtype))
            return _Part(tensor.kind, tensor.shard.chunks, values.view(torch.uint8).numpy())
        except Exception as error:
            self.error = self.error or error
            return None

    def skip(self) -> None:
        """Gather what is left, and drop it."""
        while self._left:
            with suppress(CheckpointError):
                self.next()


class _Part(NamedTuple):
    """What one rank writes of a tensor."""

    kind: Kind
    chunks: Sequence[Chunk]
    data: Any
    """The bytes of its elements, as an array of numpy: under `skip_data`, tensors would be unpickled without values."""

    def tensor(self) -> Tensor:
        """Return the elements, flat."""
        return torch.from_numpy(self.data).view(self.kind[1])


def _write(path: Path, skeleton: Any, data: Iterator[Tensor], about: dict[str, Any]) -> int:
    """Write the file with the next of `data` as each of its storages, and the manifest. Return its size in bytes."""
    without_crc = config.patch({"save.compute_crc32": False})  # type: ignore[attr-defined]
    with ChecksummedWriter(open(path, "wb", buffering=2**20), on_disk=True) as file:
        filled = _FilledFile(file, data)
        try:
            with without_crc, torch.serialization.skip_data(materialize_fake_tensors=True):
                torch.save(skeleton, cast("IO[bytes]", filled))
        except RuntimeError as error:  # torch hides what went wrong
            raise filled.error or file.error or error from None
    embed(path, lambda nbytes: Manifest(files={".": _first(file.record(), nbytes, path)}, **about))
    return path.stat().st_size


class _FilledFile:
    """A file for `torch.save` under `skip_data`: where torch seeks past the data of a storage, this writes the data."""

    def __init__(self, file: ChecksummedWriter, data: Iterator[Tensor]) -> None:
        self._file, self._data = file, data
        self.write, self.flush = file.write, file.flush
        self.error: BaseException | None = None

    def seek(self, nbytes: int, whence: int) -> None:
        """Write the next storage."""
        try:
            values = bytes_of(next(self._data))
            assert (whence, nbytes) == (os.SEEK_CUR, len(values)), "torch.save writes storages in another order"
            self._file.write(values)
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
