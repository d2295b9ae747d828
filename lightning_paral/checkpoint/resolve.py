"""Find the checkpoint at a path or URL, which another process may replace meanwhile, and read its manifest."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from lightning_paral.checkpoint.io.atomic import resolve
from lightning_paral.checkpoint.io.storage import (
    COPY_NAME,
    FsspecStorage,
    LocalStorage,
    folder_at,
    get_file,
    is_remote,
    without_scheme,
)
from lightning_paral.checkpoint.manifest import FILE_NAME, MAX_BYTES, Manifest, extract
from lightning_paral.checkpoint.safe_load.archive import check_regular
from lightning_paral.distributed.agreement import RankGroup
from lightning_paral.errors import CheckpointError, MissingCheckpointError, ParalError

T = TypeVar("T")

_ATTEMPTS = 10


def read_current(path: str | Path, ranks: RankGroup, read: Callable[[str | Path], T]) -> T:
    """Return `read(location)` of the checkpoint `path`, repeated if a save replaced it meanwhile. *Collective*.

    Args:
        path: file, folder or URL.
        ranks: the ranks that call together.
        read: called with the location. For a file behind a URL this is a local copy, whose name is removed when `read`
            returns; tensors that were mapped from it stay valid.

    Raises:
        CheckpointError: there is no checkpoint, `read` raised, or the checkpoint is replaced again and again.
    """
    for _ in range(_ATTEMPTS):
        here, version = ranks.run_on_rank_0(f"Loading {path}", lambda: _find(path))
        copy = ranks.run_on_all(f"Loading {path}", lambda: get_file(str(path)) if is_remote(path) else None)
        error: CheckpointError | OSError | None = None
        try:
            found = read(here if copy is None else copy)
        except (CheckpointError, OSError) as raised:
            error = raised
        finally:
            if copy is not None:
                copy.unlink()
        if ranks.run_on_rank_0(f"Loading {path}", lambda: _find(path)) == (here, version):
            if error is None:
                return found
            message = COPY_NAME.sub(lambda _: str(path), str(error))  # name what the user gave, not the copy
            unread = "" if isinstance(error, CheckpointError) else f"{path} cannot be read: "
            missing = isinstance(error, MissingCheckpointError)
            raise (MissingCheckpointError if missing else CheckpointError)(unread + message) from error
    raise CheckpointError(f"{path} is replaced too often: all {_ATTEMPTS} attempts to read it were interrupted.")


def _find(path: str | Path) -> tuple[str | Path, Any]:
    """Return the location of the checkpoint, and a version that changes when it is replaced."""
    if is_remote(path):
        return path, None
    here = resolve(Path(without_scheme(path)))
    with suppress(OSError):
        about = here.stat()
        return here, (about.st_dev, about.st_ino, about.st_mtime_ns)
    return here, None


@contextmanager
def explain_read_errors(path: object) -> Iterator[None]:
    """Turn unexpected errors while a checkpoint is read into one that names it; `ParalError` and `OSError` pass.

    Raises:
        CheckpointError: `path` is damaged, or no checkpoint.
    """
    try:
        yield
    except (ParalError, OSError):
        raise
    except Exception as error:
        raise CheckpointError(f"{path} is damaged, or no checkpoint: {type(error).__name__}: {error}") from error


def read_manifest(path: str | Path) -> Manifest | None:
    """Return the manifest of the checkpoint at `path`; `None` if it is of another tool.

    Raises:
        CheckpointError: there is no checkpoint, or its manifest is damaged.
    """
    if not is_remote(path) and Path(path).is_file():
        return extract(path)
    folder = folder_at(path)
    if isinstance(folder, LocalStorage) and os.path.lexists(folder.path):
        check_regular(path, folder.path.stat().st_mode)
    size = folder.size(FILE_NAME)
    if size is None:
        if isinstance(folder, FsspecStorage) or not folder.path.is_dir():
            raise MissingCheckpointError(f"Checkpoint file not found: {path}. There is no checkpoint at {path}.")
        return None
    if size > MAX_BYTES:
        raise CheckpointError(f"{folder.name(FILE_NAME)} is damaged or hostile: it has {size} bytes.")
    return Manifest.from_json(bytes(folder.read(FILE_NAME, 0, size)).decode(errors="replace"), folder.name(FILE_NAME))
