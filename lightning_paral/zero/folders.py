"""A run's own subfolders on NVMe, which go with the run, or with the weights that are nowhere else."""

import atexit
import shutil
import weakref
from pathlib import Path

from torch.nn import Module

from lightning_paral.zero.options import ZeROOptions
from lightning_paral.zero.partition import lies_in


class RunFolders:
    """The subfolders of one run at a time."""

    def __init__(self) -> None:
        self._paths: list[Path] = []

    def make(self, options: ZeROOptions, run: str) -> dict[str, Path]:
        """Make a subfolder wherever `options` offload to NVMe; return it by DeepSpeed's name of the offload.

        Args:
            options: of the strategy.
            run: a name no other run has, the same on all ranks.
        """
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
        """Remove the run's files, but for parameters of `module` that are nowhere else: they go with it."""
        for folder in self._paths:
            if module is not None and any(lies_in(folder, parameter) for parameter in module.parameters()):
                _remove(folder / "zero_stage_3" / "optimizer")
                weakref.finalize(module, _remove, folder)
            else:
                _remove(folder)
        self._paths = []


def _remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
