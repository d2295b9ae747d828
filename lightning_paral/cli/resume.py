"""The option `--resume` of `paral fit`."""

from collections.abc import Iterable
from pathlib import Path

from lightning.pytorch import Callback

from lightning_paral.callbacks.auto_resume import AutoResume
from lightning_paral.checkpoint.candidates import SUFFIX, is_checkpoint
from lightning_paral.checkpoint.io.urls import is_remote, without_scheme
from lightning_paral.errors import ConfigurationError, MissingCheckpointError


def checkpoint_or_callback(resume: str, callbacks: Iterable[Callback]) -> str | AutoResume:
    """Return the checkpoint that `--resume` names, or a callback that chooses one in the folder that it names.

    Args:
        resume: `"auto"` for the folder of the `ModelCheckpoint` among `callbacks`; otherwise the path of a folder,
            which may not exist yet, or the path or URL of a checkpoint.
        callbacks: the callbacks of the Trainer.

    Raises:
        ConfigurationError: with `"auto"`, the callbacks name no folder, or several.
        MissingCheckpointError: the path ends in `.ckpt`, and there is nothing.
    """
    if resume == "auto":
        return AutoResume(_folder_of(callbacks))
    if is_remote(resume):
        return resume
    path = Path(without_scheme(resume))
    if path.is_file() or (path.is_dir() and is_checkpoint(path)):
        return resume
    if path.suffix == SUFFIX:
        raise MissingCheckpointError(f"--resume {resume}: there is no checkpoint at this path.")
    return AutoResume(resume)


def _folder_of(callbacks: Iterable[Callback]) -> str:
    folders = {str(folder) for each in callbacks if (folder := getattr(each, "dirpath", None))}
    if len(folders) == 1:
        return folders.pop()
    given = f"these folders: {', '.join(sorted(folders))}" if folders else "no folder"
    raise ConfigurationError(
        f"--resume auto takes the folder from the callbacks of the Trainer, which name {given}. Name the folder, as in "
        "--resume checkpoints, and let ModelCheckpoint(dirpath='checkpoints') save there. Without dirpath, each start "
        "of a run saves to another folder."
    )
