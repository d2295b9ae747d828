"""Load a checkpoint: find it, even while another process replaces it, verify it, and open it with lazy tensors."""

import logging
import os
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from lightning_paral.checkpoint.archive import check_regular
from lightning_paral.checkpoint.commit import remove_leftovers, resolve
from lightning_paral.checkpoint.lazy_tensor import LazyTensor
from lightning_paral.checkpoint.manifest import FILE_NAME, MAX_BYTES, Manifest, extract
from lightning_paral.checkpoint.reader import open_checkpoint
from lightning_paral.checkpoint.storage import COPY_NAME, folder_at, get_file, is_remote, without_scheme
from lightning_paral.checkpoint.tree import tensors_in
from lightning_paral.distributed.exchange import RankGroup, explain
from lightning_paral.errors import CheckpointError, MissingCheckpointError, explain_read_errors

SUFFIX = ".ckpt"

T = TypeVar("T")

_ATTEMPTS = 10

_log = logging.getLogger(__name__)


def load(path: str | Path, ranks: RankGroup, *, weights_only: bool = True) -> dict[str, Any]:
    """Verify the checkpoint at `path`, and return it in Lightning's format. *Collective* over `ranks`.

    Args:
        path: the path of a file or folder, or a URL; saved by this package or Lightning.
        ranks: the ranks that load together. Each verifies a part of the files.
        weights_only: `False` trusts the checkpoint and runs code in it.

    Returns:
        dict[str, Any]: the checkpoint, with tensors on the host: memory-mapped, or as `LazyTensor`.

    Raises:
        CheckpointError: there is no checkpoint at `path`, or it is damaged. Raised on all ranks, with the name of the
            file.
    """
    what = f"Loading {path}"
    started = time.monotonic()

    def read(location: str | Path) -> dict[str, Any]:
        # All ranks use the manifest that rank 0 read, so that all of them take the same branch.
        manifest = ranks.run_on_rank_0(what, lambda: read_manifest(location))
        if manifest is not None:
            ranks.run_on_all(what, lambda: verify_blocks(location, manifest, ranks))
        return ranks.run_on_all(what, lambda: open_checkpoint(location, weights_only=weights_only, manifest=manifest))

    checkpoint = read_current(path, ranks, read)
    if ranks.is_rank_0:
        _log.info("checkpoint verified and opened: %s, %.1f s", path, time.monotonic() - started)
    return checkpoint


def peek(path: str | Path, *, weights_only: bool = True) -> tuple[Manifest | None, dict[str, Any]]:
    """Return the manifest and the content of the checkpoint at `path` without verifying it, in this process only.

    Raises:
        CheckpointError: there is no checkpoint at `path`, or it cannot be read.
    """

    def read(location: str | Path) -> tuple[Manifest | None, dict[str, Any]]:
        manifest = read_manifest(location)
        return manifest, open_checkpoint(location, weights_only=weights_only, manifest=manifest)

    return read_current(path, RankGroup(), read)


def read_current(path: str | Path, ranks: RankGroup, read: Callable[[str | Path], T]) -> T:
    """Call `read` with the location of the checkpoint; repeat it if a save replaces the checkpoint meanwhile.

    *Collective* over `ranks`.

    Args:
        path: the path of a file or folder, or a URL.
        ranks: the ranks that load together.
        read: called with the location. For a file at a URL, this is a local copy, which is unlinked when `read`
            returns. Tensors that were mapped from it stay valid.

    Returns:
        T: what `read` returned.

    Raises:
        CheckpointError: there is no checkpoint, `read` raised an error, or the checkpoint was replaced during each
            attempt.
    """
    for _ in range(_ATTEMPTS):
        location, version = ranks.run_on_rank_0(f"Loading {path}", lambda: _find(path))
        copy = ranks.run_on_all(f"Loading {path}", lambda: get_file(str(path)) if is_remote(path) else None)
        error: CheckpointError | OSError | None = None
        try:
            found = read(location if copy is None else copy)
        except (CheckpointError, OSError) as raised:
            error = raised
        finally:
            if copy is not None:
                copy.unlink()
        if ranks.run_on_rank_0(f"Loading {path}", lambda: _find(path)) == (location, version):
            if error is None:
                return found
            message = COPY_NAME.sub(lambda _: str(path), str(error))  # name the user's path instead of the copy
            prefix = "" if isinstance(error, CheckpointError) else f"{path} cannot be read: "
            missing = isinstance(error, MissingCheckpointError)
            raise (MissingCheckpointError if missing else CheckpointError)(prefix + message) from error
    raise CheckpointError(
        f"{path} was replaced by another save during each of {_ATTEMPTS} attempts to read it. Load it when no other "
        "process saves to it."
    )


def _find(path: str | Path) -> tuple[str | Path, Any]:
    """Return the location of the checkpoint, and a version that changes when it is replaced."""
    if is_remote(path):
        return path, None
    location = resolve(Path(without_scheme(path)))
    with suppress(OSError):
        about = location.stat()
        return location, (about.st_dev, about.st_ino, about.st_mtime_ns)
    return location, None


def read_manifest(path: str | Path) -> Manifest | None:
    """Return the manifest of the checkpoint at `path`; `None` if another tool saved it.

    Raises:
        CheckpointError: there is no checkpoint, or its manifest is damaged.
    """
    if not is_remote(path):
        if os.path.isfile(path):
            return extract(path)
        if os.path.lexists(path):
            check_regular(path, os.stat(path).st_mode)
    folder = folder_at(path)
    size = folder.size(FILE_NAME)
    if size is None:
        if is_remote(path) or not os.path.isdir(path):
            raise MissingCheckpointError(f"Checkpoint file not found: {path}. There is no checkpoint at {path}.")
        return None
    if size > MAX_BYTES:
        raise CheckpointError(f"{folder.name(FILE_NAME)} is damaged or hostile: it has {size} bytes.")
    return Manifest.from_json(bytes(folder.read(FILE_NAME, 0, size)).decode(errors="replace"), folder.name(FILE_NAME))


# Verify


def check(path: str | Path, *, weights_only: bool = True) -> tuple[Manifest | None, list[str]]:
    """Check the checkpoint at `path` in this process. Return its manifest, `None` if another tool saved it, and faults.

    Files are compared with the checksums in the manifest, if there is one. The checkpoint is opened, which checks that
    chunks cover every tensor, and each chunk is read.

    Args:
        path: the path of a file or folder, or a URL.
        weights_only: `False` trusts the checkpoint and runs code in it.
    """

    def read(location: str | Path) -> tuple[Manifest | None, list[str]]:
        manifest = read_manifest(location)
        faults = [] if manifest is None else list(find_faults(location, manifest, RankGroup()))
        with explain_read_errors(location):
            if not faults:
                checkpoint = open_checkpoint(location, weights_only=weights_only, manifest=manifest)
                # Behind a URL, do not fetch data a second time if its checksums have just been verified.
                faults = [] if manifest is not None and is_remote(location) else list(_unreadable_tensors(checkpoint))
        return manifest, faults

    try:
        return read_current(path, RankGroup(), read)
    except CheckpointError as error:
        return None, [str(error)]


def verify(path: str | Path) -> list[str]:
    """Return every fault of the checkpoint at `path`; an empty list if it is complete and undamaged."""
    return check(path)[1]


def verify_blocks(path: str | Path, manifest: Manifest, ranks: RankGroup) -> None:
    """Verify this rank's range of the blocks of all files.

    Raises:
        CheckpointError: files are damaged, truncated or missing. The message names them.
    """
    faults = list(find_faults(path, manifest, ranks))
    if faults:
        raise CheckpointError(f"The checkpoint is damaged, and nothing was loaded: {'; '.join(faults[:5])}.")


def verify_records(path: str | Path, ranks: RankGroup) -> None:
    """Verify a file that another tool saved with `torch.save`, by the CRC-32 of its records. *Collective* over `ranks`.

    Folders, and files that were saved after `torch.serialization.set_crc32_options(False)`, have none and are accepted.

    Raises:
        CheckpointError: a record is damaged. Raised on all ranks.
    """

    def find_damaged() -> str | None:
        if not zipfile.is_zipfile(path):
            return None  # a folder, or a file that loading refuses
        with zipfile.ZipFile(path) as archive:
            return archive.testzip() if any(record.CRC for record in archive.infolist()) else None

    damaged = ranks.run_on_rank_0(f"Loading {path}", find_damaged)
    if damaged is not None:
        raise CheckpointError(f"{path} is damaged: the checksum of {damaged} does not match.")


def find_faults(path: str | Path, manifest: Manifest, ranks: RankGroup) -> Iterator[str]:
    """Yield a description of each fault in this rank's range of the blocks of all files.

    The blocks of all files, in the order of the ranks that wrote them, are divided evenly among the ranks. At an
    unchanged world size, a rank verifies roughly the blocks that it loads afterwards, so each node fetches a block from
    a shared disk once.
    """
    is_one_file = manifest.form == "full"
    if is_one_file and not is_remote(path):
        path = os.path.realpath(path)
    folder = folder_at(Path(path).parent if is_one_file else path)
    files = sorted(manifest.files, key=lambda file: (len(file), file))  # puts `__10_0` after `__9_0`
    blocks = [(file, block) for file in files for block in manifest.files[file].blocks or (None,)]  # empty files too
    bounds = [len(blocks) * rank // ranks.world_size for rank in (ranks.rank, ranks.rank + 1)]
    for file, pairs in groupby(blocks[slice(*bounds)], key=itemgetter(0)):
        record = manifest.files[file]
        found = Path(path).name if is_one_file else file
        name, size = folder.name(found), folder.size(found)
        if size is None:
            yield f"{name} is missing"
        elif size < record.bytes or (size > record.bytes and not is_one_file):  # the manifest follows in a full one
            yield f"{name} has {size} bytes instead of {record.bytes}"
        else:
            expected = [block for _, block in pairs if block is not None]
            sums = folder.checksums(found, [(offset, length) for offset, length, _ in expected])
            for (offset, length, total), found_sum in zip(expected, sums, strict=True):
                if found_sum != total:
                    yield f"{name} is damaged between bytes {offset} and {offset + length}"


def _unreadable_tensors(checkpoint: dict[str, Any]) -> Iterator[str]:
    """Yield a description of each tensor with a chunk that cannot be read."""
    for name, tensor in named_tensors(checkpoint):
        if isinstance(tensor, LazyTensor):
            try:
                for stored in tensor.chunks:
                    stored.read()
            except CheckpointError as error:
                yield f"{name}: {error}"


def named_tensors(checkpoint: dict[str, Any]) -> list[tuple[str, Tensor]]:
    """Return all weights and optimizer states, each with a name such as `optimizer_0.layer.weight.exp_avg`."""
    found = {f"state_dict.{name}": value for name, value in checkpoint.get("state_dict", {}).items()}
    for number, state in enumerate(checkpoint.get("optimizer_states", [])):
        names: dict[Any, str] = {}
        for group in state.get("param_groups", []):
            names.update(zip(group["params"], group.get("param_names", ()), strict=False))
        for key, parameter_state in state.get("state", {}).items():
            for (state_key, *_), value in tensors_in(parameter_state):
                found[f"optimizer_{number}.{names.get(key, key)}.{state_key}"] = value
    return [(name, value) for name, value in found.items() if isinstance(value, Tensor)]


# All checkpoints in a folder


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A checkpoint from which a run may resume, and what it says about itself. Its data has not been read."""

    path: str
    saved_at: float
    """The time of its last change, in seconds since 1970."""
    global_step: int = -1
    """-1 if it cannot be read."""
    epoch: int = -1
    world_size: int | None = None
    """The number of ranks that saved it; `None` if another tool saved it."""
    fault: str = ""
    """Why it cannot be read, if it is damaged."""


def is_checkpoint(path: Path) -> bool:
    """Return whether `path` looks like a checkpoint: a folder with a manifest, or with the suffix `.ckpt`."""
    return not path.name.startswith(".") and (path.suffix == SUFFIX or (path / FILE_NAME).is_file())


def find_candidates(folder: Path) -> list[Candidate]:
    """Return the checkpoints in `folder`, the newest first, then those that cannot be read.

    Newest means the largest global step, then the largest epoch, then the last save. Only manifests are read, and of
    checkpoints without one the file with the structure.

    Checkpoints that a killed save had renamed get their name back. Several names of one checkpoint, such as the link
    `last.ckpt`, count once.
    """
    if not folder.is_dir():
        return []
    with suppress(OSError):  # the folder is read-only
        remove_leftovers(folder)
    paths = sorted(filter(is_checkpoint, folder.iterdir()), key=lambda path: (not path.is_symlink(), path.name))
    unique = {os.path.realpath(path): path for path in paths}  # of a checkpoint and its links, the checkpoint
    found = [candidate for path in unique.values() if (candidate := _describe(path)) is not None]
    return sorted(found, key=lambda each: (each.global_step, each.epoch, each.saved_at), reverse=True)


def _describe(path: Path) -> Candidate | None:
    """Describe the checkpoint at `path`; return `None` if it was removed meanwhile."""
    try:
        candidate = Candidate(path=str(path), saved_at=path.stat().st_mtime)
    except FileNotFoundError:
        return None
    try:
        manifest = read_manifest(path)
        if manifest is not None:
            step, epoch, world_size = manifest.global_step, manifest.epoch, manifest.world_size
            return replace(candidate, global_step=step, epoch=epoch, world_size=world_size)
        checkpoint = read_current(path, RankGroup(), open_checkpoint)
        with explain_read_errors(path):
            step, epoch = int(checkpoint["global_step"]), int(checkpoint["epoch"])
        return replace(candidate, global_step=step, epoch=epoch)
    except (CheckpointError, OSError) as error:
        return replace(candidate, fault=explain(error)) if path.exists() else None
