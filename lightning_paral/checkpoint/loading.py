"""Loading: find out what is at a path, verify it, and return it as Lightning dumps it, tensors unread."""

import io
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

from lightning_paral.checkpoint.checksums import FileRecord
from lightning_paral.checkpoint.commit import present
from lightning_paral.checkpoint.deepspeed import find_folder, read_deepspeed
from lightning_paral.checkpoint.files import (
    Folder,
    LocalFolder,
    RemoteFolder,
    folder_at,
    get_file,
    is_remote,
    without_scheme,
)
from lightning_paral.checkpoint.full import read_full
from lightning_paral.checkpoint.geometry import Box, coverage_fault
from lightning_paral.checkpoint.manifest import FILE_NAME, Manifest, extract
from lightning_paral.checkpoint.optimizer import BESIDE_KEY, by_number
from lightning_paral.checkpoint.plan import is_large
from lightning_paral.checkpoint.ranks import Ranks
from lightning_paral.checkpoint.sharded import META, METADATA
from lightning_paral.checkpoint.stored import StoredPiece, StoredTensor, read_whole
from lightning_paral.checkpoint.unpickle import load_metadata, load_safely
from lightning_paral.checkpoint.weights import OWN_KEY
from lightning_paral.errors import CheckpointError

T = TypeVar("T")

_ATTEMPTS = 5


def load(path: str | Path, ranks: Ranks, *, weights_only: bool = True) -> dict[str, Any]:
    """Return the checkpoint at `path`, verified, with tensors that are read when they are used. *Collective*.

    Args:
        path: a file or folder of this package, Lightning or DeepSpeed.
        ranks: who loads; they share the work of verifying.
        weights_only: `False` trusts the file, and runs what code it holds.

    Raises:
        CheckpointError: there is none, or it is damaged; on all ranks, with the file's name.
    """
    what = f"Loading {path}"

    def read(here: str | Path) -> dict[str, Any]:
        manifest = ranks.on_first(what, lambda: read_manifest(here))  # what follows depends on it on all ranks
        if manifest is not None:
            ranks.each(what, lambda: verify_share(here, manifest, ranks))
        return ranks.each(what, lambda: open_checkpoint(here, weights_only=weights_only, manifest=manifest))

    return read_present(path, ranks, read)


def look(path: str | Path, *, weights_only: bool = True) -> tuple[Manifest | None, dict[str, Any]]:
    """Return manifest and contents of the checkpoint at `path`, which are not verified, in this process alone.

    Raises:
        CheckpointError: there is none, or it cannot be read.
    """

    def read(here: str | Path) -> tuple[Manifest | None, dict[str, Any]]:
        manifest = read_manifest(here)
        return manifest, open_checkpoint(here, weights_only=weights_only, manifest=manifest)

    return read_present(path, Ranks(), read)


def read_present(path: str | Path, ranks: Ranks, read: Callable[[str | Path], T]) -> T:
    """Call `read` with where the checkpoint `path` is, and again if it failed because a save replaced it. *Collective*.

    `read` is given a local copy of a file behind a URL, for it is mapped: the copy is gone when nothing of it is used
    any more.
    """
    for attempts_left in reversed(range(_ATTEMPTS)):
        here, version = ranks.on_first(f"Loading {path}", lambda: _find(path))
        copy = ranks.each(f"Loading {path}", lambda: get_file(str(path)) if is_remote(path) else None)
        try:
            return read(here if copy is None else copy)
        except (CheckpointError, OSError) as error:
            if attempts_left and ranks.on_first(f"Loading {path}", lambda: _find(path)) != (here, version):
                continue
            if isinstance(error, OSError):
                raise CheckpointError(f"{path} cannot be read: {error}") from error
            raise
        finally:
            if copy is not None:
                copy.unlink()
    raise AssertionError("unreachable")


def _find(path: str | Path) -> tuple[str | Path, Any]:
    """Return where the checkpoint is, and what tells it from another at the same path."""
    if is_remote(path):
        return path, None
    here = present(Path(without_scheme(path)))
    with suppress(OSError):
        about = here.stat()
        return here, (about.st_dev, about.st_ino, about.st_mtime_ns)
    return here, None


def read_manifest(path: str | Path) -> Manifest | None:
    """Return the manifest of the checkpoint at `path`; `None` if it is of another tool.

    Raises:
        CheckpointError: there is no checkpoint, or its manifest is damaged.
    """
    if not is_remote(path) and Path(path).is_file():
        return extract(path)
    folder = folder_at(path)
    size = folder.size(FILE_NAME)
    if size is None:
        if isinstance(folder, RemoteFolder) or not folder.path.is_dir():
            raise CheckpointError(f"There is no checkpoint at {path}.")
        return None
    return Manifest.from_json(bytes(folder.read(FILE_NAME, 0, size)).decode(errors="replace"), folder.name(FILE_NAME))


def _place(path: str | Path, manifest: Manifest) -> tuple[Folder, dict[str, str]]:
    """Return the folder of a checkpoint and its files' names there, by their names in the manifest."""
    if manifest.form == "full":
        return folder_at(Path(path).parent), {".": Path(path).name}
    return folder_at(path), {name: name for name in manifest.files}


def verify_share(path: str | Path, manifest: Manifest, ranks: Ranks) -> None:
    """Check this rank's share of all files' blocks.

    Raises:
        CheckpointError: something is damaged, truncated or missing; names the files.
    """
    faults = list(faults_of(path, manifest, ranks))
    if faults:
        raise CheckpointError(f"The checkpoint is damaged, nothing was loaded: {'; '.join(faults[:5])}.")


def faults_of(path: str | Path, manifest: Manifest, ranks: Ranks) -> Iterator[str]:
    """Return what is wrong with this rank's share of the files, as the manifest has them.

    A share is a stretch of all blocks, in the order of the ranks that wrote them: at the same world size it is what
    this rank reads afterwards, so that each host gets it from a shared disk once.
    """
    folder, names = _place(path, manifest)
    files = sorted(manifest.files, key=lambda file: (len(file), file))  # `__10_0` behind `__9_0`
    num_blocks = sum(max(1, len(manifest.files[file].blocks)) for file in files)
    share = range(num_blocks * ranks.rank // ranks.world_size, num_blocks * (ranks.rank + 1) // ranks.world_size)
    first = 0
    for file in files:
        record, name = manifest.files[file], names[file]
        here = range(first, first + max(1, len(record.blocks)))  # an empty file counts, too: it has to be there
        first = here.stop
        mine = range(max(here.start, share.start), min(here.stop, share.stop))
        if mine:
            whole_file = manifest.form != "full"
            yield from _faults_of_file(folder, name, record, [number - here.start for number in mine], whole_file)


def _faults_of_file(
    folder: Folder, file: str, record: FileRecord, blocks: list[int], whole_file: bool
) -> Iterator[str]:
    name, size = folder.name(file), folder.size(file)
    if size is None:
        yield f"{name} is missing"
    elif size < record.bytes or (whole_file and size > record.bytes):
        yield f"{name} has {size} bytes instead of {record.bytes}"
    elif record.blocks:
        expected = [record.blocks[number] for number in blocks]
        found = folder.checksums(file, [(offset, length) for offset, length, _ in expected])
        for (offset, length, total), own in zip(expected, found, strict=True):
            if own != total:
                yield f"{name} is damaged between bytes {offset} and {offset + length}"


def open_checkpoint(path: str | Path, *, weights_only: bool = True, manifest: Manifest | None = None) -> dict[str, Any]:
    """Return what is at `path` as Lightning dumps it: `state_dict`, `optimizer_states` by number, and all else."""
    folder = folder_at(path)
    if isinstance(folder, LocalFolder):
        if folder.path.is_file():
            checkpoint = read_full(folder.path, weights_only)
            if "state_dict" not in checkpoint:
                raise CheckpointError(f"{path} is no checkpoint: it has no 'state_dict'.")
            return checkpoint
        of_deepspeed = find_folder(folder.path)
        if of_deepspeed is not None:
            return read_deepspeed(of_deepspeed, weights_only)
    names = manifest.names if manifest is not None else {}
    if folder.size(names.get(METADATA, METADATA)) is None:
        raise CheckpointError(f"{path} is no checkpoint: it has no file {METADATA}.")
    checkpoint = read_meta(folder, names.get(META, META), weights_only)
    if OWN_KEY in checkpoint and manifest is None:
        raise CheckpointError(f"{folder.name(FILE_NAME)} is missing: the checkpoint is incomplete.")
    tree = read_tree(folder, names.get(METADATA, METADATA), contiguous=manifest is not None, weights_only=weights_only)
    weights = tree.pop("state_dict", None)
    checkpoint["state_dict"] = tree.pop("model", {}) if weights is None else weights
    numbers = sorted(int(key.removeprefix("optimizer_")) for key in tree if is_large(key))
    optimizers = [tree.pop(f"optimizer_{number}") for number in numbers]
    if manifest is not None:
        _fill(checkpoint, tree)
    if optimizers:
        beside = checkpoint.pop(BESIDE_KEY, [{}] * len(optimizers))
        checkpoint["optimizer_states"] = [more | by_number(s) for more, s in zip(beside, optimizers, strict=True)]
    return checkpoint


def _fill(holes: Any, values: Any) -> None:
    """Put the tensors in `values`, read, to their places in `holes`: what callbacks hold of divided tensors."""
    items = values.items() if isinstance(values, dict) else enumerate(values)
    for key, value in items:
        if isinstance(value, Tensor):
            holes[key] = read_whole(value)
        elif value is not None:
            _fill(holes[key], value)


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
    tree: dict[str, Any] = {}
    for key, kind in metadata.state_dict_metadata.items():
        value: Any
        if isinstance(kind, BytesStorageMetadata):
            info = metadata.storage_data[MetadataIndex(key)]
            data = folder.read(info.relative_path, info.offset, info.length)
            entry = f"{key} in {folder.name(info.relative_path)}"
            value = load_safely(io.BytesIO(data), weights_only=weights_only, name=entry)
        else:
            pieces = []
            for chunk in kind.chunks:
                info = metadata.storage_data[MetadataIndex(key, chunk.offsets)]
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
