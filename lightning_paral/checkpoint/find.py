"""Find checkpoints: the one at a path or URL, even while another process replaces it, or all in a folder."""

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from lightning_paral.checkpoint.archive import check_regular
from lightning_paral.checkpoint.commit import remove_leftovers, resolve
from lightning_paral.checkpoint.manifest import FILE_NAME, MAX_BYTES, Manifest, extract
from lightning_paral.checkpoint.reader import open_checkpoint
from lightning_paral.checkpoint.storage import COPY_NAME, folder_at, get_file, is_remote, without_scheme
from lightning_paral.distributed.exchange import RankGroup, explain
from lightning_paral.errors import CheckpointError, MissingCheckpointError, explain_read_errors

SUFFIX = ".ckpt"

T = TypeVar("T")

_ATTEMPTS = 10


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
    is_archive: bool = False
    """Whether it is a file that another tool saved with `torch.save`."""
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
        return replace(candidate, global_step=step, epoch=epoch, is_archive=path.is_file())
    except (CheckpointError, OSError) as error:
        return replace(candidate, fault=explain(error)) if path.exists() else None
