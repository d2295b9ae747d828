"""Looking for damage: files that are missing, of another size, or not what was written."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lightning_paral.checkpoint.io.checksums import FileRecord
from lightning_paral.checkpoint.io.storage import Folder, folder_at, is_remote
from lightning_paral.checkpoint.manifest import Manifest
from lightning_paral.distributed.agreement import RankGroup
from lightning_paral.errors import CheckpointError, ParalError


@contextmanager
def naming(path: object) -> Iterator[None]:
    """Turn whatever reading a checkpoint comes upon into one error that names it; errors of the system stay.

    Raises:
        CheckpointError: `path` is damaged, or no checkpoint.
    """
    try:
        yield
    except (ParalError, OSError):
        raise
    except Exception as error:
        raise CheckpointError(f"{path} is damaged, or no checkpoint: {type(error).__name__}: {error}") from error


def _place(path: str | Path, manifest: Manifest) -> tuple[Folder, dict[str, str]]:
    """Return the folder of a checkpoint and its files' names there, by their names in the manifest."""
    if manifest.form == "full":
        if not is_remote(path):
            path = os.path.realpath(path)  # it may be reached by a link
        return folder_at(Path(path).parent), {".": Path(path).name}
    return folder_at(path), {name: name for name in manifest.files}


def verify_blocks(path: str | Path, manifest: Manifest, ranks: RankGroup) -> None:
    """Check this rank's share of all files' blocks.

    Raises:
        CheckpointError: something is damaged, truncated or missing; names the files.
    """
    faults = list(faults_of(path, manifest, ranks))
    if faults:
        raise CheckpointError(f"The checkpoint is damaged, nothing was loaded: {'; '.join(faults[:5])}.")


def faults_of(path: str | Path, manifest: Manifest, ranks: RankGroup) -> Iterator[str]:
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
