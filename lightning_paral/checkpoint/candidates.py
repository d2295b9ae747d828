"""List the checkpoints in a folder, the newest first."""

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from lightning_paral.checkpoint.io.atomic import remove_leftovers
from lightning_paral.checkpoint.load import peek
from lightning_paral.checkpoint.manifest import FILE_NAME
from lightning_paral.checkpoint.resolve import explain_read_errors, read_manifest
from lightning_paral.distributed.exchange import explain
from lightning_paral.errors import CheckpointError

SUFFIX = ".ckpt"


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A checkpoint from which a run may resume, and what it says about itself. Its data has not been read."""

    path: str
    global_step: int
    epoch: int
    saved_at: float
    """The time of its last change, in seconds since 1970."""
    world_size: int | None = None
    """The number of ranks that saved it; `None` if another tool saved it."""
    is_archive: bool = False
    """Whether it is a file that another tool saved with `torch.save`."""
    fault: str = ""
    """Why it cannot be read, if it is damaged; its step is then unknown, and -1."""


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
    return sorted(_describe_all(unique.values()), key=_age, reverse=True)


def _age(candidate: Candidate) -> tuple[int, int, float]:
    return candidate.global_step, candidate.epoch, candidate.saved_at


def _describe_all(paths: Iterable[Path]) -> Iterator[Candidate]:
    for path in paths:
        with suppress(FileNotFoundError):  # removed meanwhile
            saved_at = path.stat().st_mtime
            try:
                yield _describe(path, saved_at)
            except (CheckpointError, OSError) as error:
                if path.exists():
                    yield Candidate(path=str(path), global_step=-1, epoch=-1, saved_at=saved_at, fault=explain(error))


def _describe(path: Path, saved_at: float) -> Candidate:
    manifest = read_manifest(path)
    if manifest is not None:
        step, epoch, world_size = manifest.global_step, manifest.epoch, manifest.world_size
        return Candidate(path=str(path), global_step=step, epoch=epoch, saved_at=saved_at, world_size=world_size)
    _, checkpoint = peek(path)
    with explain_read_errors(path):
        step, epoch = int(checkpoint["global_step"]), int(checkpoint["epoch"])
    return Candidate(path=str(path), global_step=step, epoch=epoch, saved_at=saved_at, is_archive=path.is_file())
