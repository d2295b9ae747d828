"""Read a sharded checkpoint outside of a run, as `load_from_checkpoint` reads a file."""

import os
from pathlib import Path
from typing import Any

import torch

from lightning_paral.checkpoint.io.storage import file_system, is_remote
from lightning_paral.compat.torch.pytree import tree_map_only


def is_folder(path: Any) -> bool:
    """Whether `path`, a path, URL or open file, is that of a folder."""
    if not isinstance(path, str | os.PathLike) or str(path).startswith("http"):
        return False
    if not is_remote(path):
        return Path(path).is_dir()
    fs, name = file_system(str(path))
    return bool(fs.isdir(name))


def read_folder(path: Any, *, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
    """Return the checkpoint at `path`, verified, with tensors that are read when they are used, one by one.

    Args:
        path: a folder of this package, Lightning or DeepSpeed.
        map_location: where tensors are read to, as `torch.load` takes it; stored tensors count as CPU tensors.
        weights_only: `False` trusts the folder, and runs what code it holds.

    Raises:
        CheckpointError: the folder is no checkpoint, is damaged, or holds code and is not trusted.
    """
    from lightning_paral.checkpoint.lazy_tensor import LazyTensor
    from lightning_paral.checkpoint.load import load  # takes long to import
    from lightning_paral.distributed.agreement import RankGroup

    checkpoint = load(os.fspath(path), RankGroup(), weights_only=weights_only is not False)
    device = _device(map_location)
    if device.type == "cpu":
        return checkpoint

    def moved(stored: LazyTensor) -> LazyTensor:
        return LazyTensor(stored.shape, stored.dtype, stored.pieces, device)

    moved_tensors: dict[str, Any] = tree_map_only(LazyTensor, moved, checkpoint)
    return moved_tensors


def _device(map_location: Any) -> torch.device:
    """Return where `map_location` puts CPU tensors."""
    if callable(map_location):
        found = map_location(torch.empty(0).untyped_storage(), "cpu")
        return torch.device("cpu") if found is None else found.device
    if isinstance(map_location, dict):
        map_location = map_location.get("cpu")
    return torch.device("cpu" if map_location is None else map_location)
