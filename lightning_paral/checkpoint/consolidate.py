"""Convert any checkpoint to one Lightning file, in small slices, so that memory use is constant."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_paral.checkpoint.formats.deepspeed import find_folder
from lightning_paral.checkpoint.formats.full import write_all, write_skeleton
from lightning_paral.checkpoint.formats.sharded import META, METADATA
from lightning_paral.checkpoint.io.atomic import AtomicPath
from lightning_paral.checkpoint.io.files import BackgroundFsync, BlockChecksums, FileRecord, reader_of
from lightning_paral.checkpoint.lazy_tensor import LazyTensor, flat_slices
from lightning_paral.checkpoint.manifest import FILE_NAME, Manifest, embed
from lightning_paral.checkpoint.save_plan import WriteItem
from lightning_paral.checkpoint.shards import NO_SHARD, bytes_of
from lightning_paral.checkpoint.tree import CURRENT_KEY, WEIGHT_KEYS, tensors_in, view_key
from lightning_paral.errors import CheckpointError, ConfigurationError

Progress = Callable[[int], None]
"""Called with the number of bytes written since the last call."""

STEP_BYTES = 2**22
"""Number of bytes that are read and written at a time."""


def select(checkpoint: dict[str, Any], *, weights_only: bool, dtype: torch.dtype | None) -> dict[str, Any]:
    """Return the entries of `checkpoint` to write. No tensor is read; those to be cast are wrapped in `Cast`.

    Args:
        checkpoint: a checkpoint in Lightning's format.
        weights_only: whether to leave out optimizer states and other training state.
        dtype: the dtype of floating-point weights in the output; `None` keeps their dtypes.
    """
    kept = dict(checkpoint)
    if weights_only:
        training_keys = ("optimizer_states", "lr_schedulers", "callbacks", CURRENT_KEY, "averaging_state")
        kept = {key: value for key, value in kept.items() if key not in training_keys}
    if dtype is not None:
        kept["state_dict"] = type(kept["state_dict"])(
            (name, Cast(value, dtype) if isinstance(value, Tensor) and value.is_floating_point() else value)
            for name, value in kept["state_dict"].items()
        )
    return kept


class Cast:
    """A tensor to be written in another dtype."""

    def __init__(self, tensor: Tensor, dtype: torch.dtype) -> None:
        self.tensor = tensor
        self.dtype = dtype


def check_free_space(folder: Path, needed_bytes: int) -> None:
    """Raise a `CheckpointError` if the disk of `folder` has less than `needed_bytes` free."""
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < needed_bytes:
        raise CheckpointError(
            f"The output needs {needed_bytes / 1e9:.2f} GB, but only {free_bytes / 1e9:.2f} GB are free in {folder}. "
            "Free some space, or write elsewhere."
        )


def size_of(checkpoint: dict[str, Any]) -> int:
    """Return the total size of the tensors in `checkpoint` in bytes. Tied tensors count once."""
    return sum(item.nbytes for item, _ in items_of(checkpoint))


def write_file(checkpoint: dict[str, Any], out: Path, about: dict[str, Any], progress: Progress) -> None:
    """Write `checkpoint` to `out`, atomically, as an ordinary Lightning file with a manifest.

    Args:
        checkpoint: the entries to write, as returned by `select`.
        out: the path of the file.
        about: the fields of the manifest except `files`.
        progress: called after each write.

    Raises:
        CheckpointError: the disk does not have enough free space.
    """
    pairs = items_of(checkpoint)
    check_free_space(out.parent, sum(item.nbytes for item, _ in pairs))
    draft = AtomicPath(out, folder=False)
    try:
        offsets = write_skeleton(checkpoint, [item for item, _ in pairs], draft.path)
        checksums = BlockChecksums()
        with open(draft.path, "r+b") as file:
            read, write = reader_of(file.fileno()), partial(write_all, file.fileno())
            with BackgroundFsync(file.fileno()) as fsync:
                for offset, (item, tensor) in sorted(zip(offsets, pairs, strict=True), key=itemgetter(0)):
                    checksums.catch_up(read, offset)
                    for values in flat_slices(tensor, STEP_BYTES):
                        data = bytes_of(values.to(item.dtype))
                        write(data, checksums.position)
                        checksums.update(data)
                        fsync.wrote(len(data))
                        progress(len(data))
                fsync.finish()

            def record(nbytes: int) -> FileRecord:
                checksums.catch_up(read, nbytes)
                return checksums.record()

            embed(draft.path, lambda nbytes: Manifest(files={".": record(nbytes)}, **about))
        draft.commit()
    except BaseException:
        draft.discard()
        raise


def items_of(checkpoint: dict[str, Any]) -> list[tuple[WriteItem, Tensor]]:
    """Return a `WriteItem` and the values of each tensor of weights and optimizer states. Tied tensors occur once."""
    found: dict[Any, tuple[WriteItem, Tensor]] = {}
    large = {key: checkpoint[key] for key in (*WEIGHT_KEYS, "optimizer_states") if key in checkpoint}
    for path, value in _tensors_and_casts(large):
        tensor = value.tensor if isinstance(value, Cast) else value
        key = _storage_key(tensor)
        if key in found:
            found[key][0].aliases.append(path)
        else:
            found[key] = (WriteItem(path, tuple(tensor.shape), value.dtype, NO_SHARD), tensor)
    return list(found.values())


def _tensors_and_casts(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    if isinstance(tree, Cast):
        yield path, tree
    elif isinstance(tree, dict):
        for key, value in tree.items():
            yield from _tensors_and_casts(value, (*path, key))
    else:
        yield from tensors_in(tree, path)


def _storage_key(tensor: Tensor) -> Any:
    """Return a key that is equal for tied tensors, both for `LazyTensor` and for tensors mapped from a file."""
    if isinstance(tensor, LazyTensor):
        locations = [stored.location for stored in tensor.chunks]
        return tuple(locations) if locations and None not in locations else id(tensor)
    return view_key(tensor)


def check_outside(out: Path, checkpoint: str | Path) -> None:
    """Raise a `ConfigurationError` if `out` is the folder of a checkpoint, such as `checkpoint`, or is inside one."""
    target = out.resolve()
    source = Path(checkpoint).resolve()
    for folder in (target, *target.parents):
        if (folder == source and source.exists()) or _is_checkpoint(folder):
            raise ConfigurationError(
                f"{out} is inside the checkpoint {folder}, which must not be modified. Write elsewhere."
            )


def _is_checkpoint(folder: Path) -> bool:
    with suppress(OSError, ValueError):
        has_metadata = (folder / METADATA).is_file()
        others = (folder / FILE_NAME).is_file() or (folder / META).is_file() or any(folder.glob("*.distcp"))
        if has_metadata and others:
            return True
        return find_folder(folder) is not None
    return False
