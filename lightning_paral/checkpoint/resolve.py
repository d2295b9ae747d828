"""Find the checkpoint at a path or URL, even while another process replaces it, and read its manifest."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from lightning_paral.checkpoint.io.atomic import resolve
from lightning_paral.checkpoint.io.storage import FsspecStorage, LocalStorage, folder_at
from lightning_paral.checkpoint.io.urls import COPY_NAME, get_file, is_remote, without_scheme
from lightning_paral.checkpoint.manifest import FILE_NAME, MAX_BYTES, Manifest, extract
from lightning_paral.checkpoint.safe_load.archive import check_regular
from lightning_paral.distributed.exchange import RankGroup
from lightning_paral.errors import CheckpointError, MissingCheckpointError, ParalError

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


@contextmanager
def explain_read_errors(path: object) -> Iterator[None]:
    """Replace unexpected errors inside the context by a `CheckpointError` that names the checkpoint.

    `ParalError` and `OSError` are not replaced.

    Raises:
        CheckpointError: `path` is damaged or not a checkpoint.
    """
    try:
        yield
    except (ParalError, OSError):
        raise
    except Exception as error:
        raise CheckpointError(f"{path} is damaged or not a checkpoint: {type(error).__name__}: {error}") from error


def read_manifest(path: str | Path) -> Manifest | None:
    """Return the manifest of the checkpoint at `path`; `None` if another tool saved it.

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
