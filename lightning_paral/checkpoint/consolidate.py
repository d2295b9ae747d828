"""Write a checkpoint of any format as one Lightning file, tensor by tensor, so that memory does not grow with it."""

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from lightning_paral.checkpoint.full import write_full
from lightning_paral.checkpoint.layout import full_chunk
from lightning_paral.checkpoint.lazy_tensor import LazyTensor, materialize
from lightning_paral.checkpoint.saved_tensors import SavedTensor
from lightning_paral.checkpoint.shards import NO_SHARD, LocalShard
from lightning_paral.checkpoint.tree import WEIGHT_KEYS, tensors_in, view_key
from lightning_paral.distributed.exchange import RankGroup
from lightning_paral.errors import CheckpointError


def write_file(
    checkpoint: dict[str, Any], path: Path, about: dict[str, Any], *, dtype: torch.dtype | None = None, copies: int = 1
) -> None:
    """Write `checkpoint` to the new file `path` as an ordinary Lightning file with a manifest, and show the progress.

    At any time, one tensor is in memory. Tensors outside of weights and optimizer states are already there.

    Args:
        checkpoint: a checkpoint in Lightning's format, as `load` returns it.
        path: the path of the file.
        about: the fields of the manifest except `files`.
        dtype: the dtype of floating-point weights in the file; `None` keeps their dtypes.
        copies: how many times as much free space as for the file is needed.

    Raises:
        CheckpointError: the disk does not have enough free space, or a tensor could not be read or written.
    """
    with tqdm(unit="B", unit_scale=True, desc="tensors") as bar:
        tensors = _tensors(checkpoint, dtype, bar.update)
        bar.reset(total=sum(tensor.nbytes for tensor in tensors))
        needed_bytes, free_bytes = copies * bar.total, shutil.disk_usage(path.parent).free
        if free_bytes < needed_bytes:
            raise CheckpointError(
                f"The output needs {needed_bytes / 1e9:.2f} GB, but only {free_bytes / 1e9:.2f} GB are free in "
                f"{path.parent}. Free some space, or write elsewhere."
            )
        write_full(checkpoint, tensors, path, RankGroup(), about, "Writing the output")


def _tensors(
    checkpoint: dict[str, Any], dtype: torch.dtype | None, progress: Callable[[int], object]
) -> list[SavedTensor]:
    """Return each tensor of weights and optimizer states. It is read when it is written. Tied tensors occur once."""
    found: dict[Any, SavedTensor] = {}
    for key in (*WEIGHT_KEYS, "optimizer_states"):
        for path, tensor in tensors_in(checkpoint.get(key), (key,)):
            cast = dtype if key == "state_dict" and tensor.is_floating_point() else None
            saved = SavedTensor((path,), tuple(tensor.shape), cast or tensor.dtype, NO_SHARD)
            if tensor.numel():
                saved.shard = LocalShard((full_chunk(tensor.shape),), partial(_read, tensor, progress, saved.nbytes))
            first = found.setdefault((_location(tensor), saved.dtype), saved)
            if first is not saved:
                first.paths += (path,)
    return list(found.values())


def _read(tensor: Tensor, progress: Callable[[int], object], nbytes: int) -> Tensor:
    progress(nbytes)
    return materialize(tensor)


def _location(tensor: Tensor) -> Any:
    """Return a key that is equal for tied tensors, both for `LazyTensor` and for tensors mapped from a file."""
    if isinstance(tensor, LazyTensor):
        locations = [stored.location for stored in tensor.chunks]
        return tuple(locations) if locations and None not in locations else id(tensor)
    return view_key(tensor)
