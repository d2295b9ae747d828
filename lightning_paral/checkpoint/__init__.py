"""One checkpoint for every strategy and world size: the shards of the ranks, and how they are saved and loaded.

What is here reads the folder of a sharded checkpoint for Lightning's `load_from_checkpoint`, in one process.
"""

import io
import os
from pathlib import Path
from typing import Any

import torch


def is_folder(path: Any) -> bool:
    """Return whether `path` refers to a folder. It may be a path, a URL or an open file."""
    if not isinstance(path, str | os.PathLike) or str(path).startswith("http"):
        return False
    from lightning_paral.checkpoint.storage import file_system, is_remote  # `import lightning_paral` does not load it

    if not is_remote(path):
        return Path(path).is_dir()
    fs, name = file_system(str(path))
    return bool(fs.isdir(name))


def read_folder(path: Any, *, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
    """Verify the checkpoint at `path`, and return it with tensors as `LazyTensor`.

    Args:
        path: a folder that was saved by this package or Lightning.
        map_location: as for `torch.load`. Tensors are read to the device to which it maps CPU tensors.
        weights_only: `False` trusts the checkpoint and runs code in it.

    Raises:
        CheckpointError: the folder is damaged or not a checkpoint, or it contains code and `weights_only` is not
            `False`.
    """
    from lightning_paral.checkpoint.lazy_tensor import LazyTensor
    from lightning_paral.checkpoint.load import load  # `import lightning_paral` does not load it
    from lightning_paral.compat.torch.tensors import tree_map_only
    from lightning_paral.distributed.exchange import RankGroup

    checkpoint = load(os.fspath(path), RankGroup(), weights_only=weights_only is not False)
    probe = io.BytesIO()
    torch.save(torch.empty(0), probe)
    probe.seek(0)
    device = torch.load(probe, map_location).device

    def moved(stored: LazyTensor) -> LazyTensor:
        return LazyTensor(stored.shape, stored.dtype, stored.chunks, device)

    moved_tensors: dict[str, Any] = tree_map_only(LazyTensor, moved, checkpoint)
    return moved_tensors
