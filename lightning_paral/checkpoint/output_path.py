"""Where a command may write: not into checkpoints."""

from contextlib import suppress
from pathlib import Path

from lightning_paral.checkpoint.formats.deepspeed import find_folder
from lightning_paral.checkpoint.formats.sharded import META, METADATA
from lightning_paral.checkpoint.manifest import FILE_NAME
from lightning_paral.errors import ConfigurationError


def check_outside(out: Path, checkpoint: str | Path) -> None:
    """Raise a `ConfigurationError` if `out` is, or lies in, the folder `checkpoint` or another checkpoint's."""
    place = out.resolve()
    read = Path(checkpoint).resolve()
    for folder in (place, *place.parents):
        if (folder == read and read.exists()) or _is_checkpoint(folder):
            raise ConfigurationError(
                f"{out} is in the checkpoint {folder}, which is to stay as it was saved. Write outside of it."
            )


def _is_checkpoint(folder: Path) -> bool:
    with suppress(OSError, ValueError):
        of_torch = (folder / METADATA).is_file()
        if of_torch and ((folder / FILE_NAME).is_file() or (folder / META).is_file() or any(folder.glob("*.distcp"))):
            return True
        return find_folder(folder) is not None
    return False
