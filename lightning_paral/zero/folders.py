"""A run's own subfolders on NVMe, which go with the run, or with the weights that are nowhere else."""

import atexit
import os
import shutil
import weakref
from contextlib import suppress
from pathlib import Path

from torch.nn import Module

from lightning_paral.zero.options import ZeROOptions
from lightning_paral.zero.partition import lies_in


class RunFolders:
    """The subfolders of one run at a time."""

    def __init__(self) -> None:
        self._paths: list[Path] = []
        self._rank = 0

    def make(self, options: ZeROOptions, run: str, rank: int) -> dict[str, Path]:
        """Make a subfolder wherever `options` offload to NVMe; return it by DeepSpeed's name of the offload.

        Args:
            options: of the strategy.
            run: a name no other run has, the same on all ranks.
            rank: of this process, among all of the run.
        """
        self._rank = rank
        folders = {}
        for option, offload in options.on_nvme.items():
            assert offload.path is not None
            folder = Path(offload.path) / f"paral_zero_{run[:12]}"
            folder.mkdir(exist_ok=True)
            atexit.register(_remove, folder)
            folders["offload_optimizer" if option == "offload_optimizer" else "offload_param"] = folder
        self._paths += folders.values()
        return folders

    def leave(self, module: Module | None) -> None:
        """Remove this rank's files, except for parameters of `module` that are stored nowhere else.

        These are removed when `module` is freed. Files of other ranks stay, because they may still be in use; those of
        a killed rank are removed when another rank of its host exits.
        """
        for folder in self._paths:
            if module is not None and any(lies_in(folder, parameter) for parameter in module.parameters()):
                _remove_rank(folder / "zero_stage_3" / "optimizer", self._rank)
                weakref.finalize(module, _remove_rank, folder, self._rank)
            else:
                _remove_rank(folder, self._rank)
        self._paths = []


def _remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)


def _remove_rank(folder: Path, rank: int) -> None:
    """Remove what DeepSpeed wrote below `folder` on `rank`, and the folders that this leaves empty."""
    for inner in (Path(name) for name, _, _ in os.walk(folder, topdown=False)):
        if inner.name == f"rank{rank}":
            _remove(inner)
        elif not inner.name.startswith("rank"):  # an empty folder of another rank may be written to later
            with suppress(OSError):  # other ranks' folders are in it
                inner.rmdir()
