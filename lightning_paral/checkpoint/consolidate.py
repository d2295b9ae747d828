"""Convert any checkpoint to one Lightning file, one tensor at a time: in constant memory."""

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
"""Bytes that are read and written at a time."""


def select(checkpoint: dict[str, Any], *, weights_only: bool, dtype: torch.dtype | None) -> dict[str, Any]:
    """Return the entries of `checkpoint` that are to be written, tensors unread, with casts marked by `Cast`.

    Args:
        checkpoint: as Lightning dumps it.
        weights_only: leave out optimizer states and other states of training.
        dtype: of floating-point weights in the output; `None` keeps theirs.
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
            f"The output will have {needed_bytes / 1e9:.2f} GB, and {free_bytes / 1e9:.2f} GB are free in {folder}. "
            "Make room, or write elsewhere."
        )


def size_of(checkpoint: dict[str, Any]) -> int:
    """Return the number of bytes of all tensors in `checkpoint`, tied ones once."""
    return sum(item.nbytes for item, _ in items_of(checkpoint))


def write_file(checkpoint: dict[str, Any], out: Path, about: dict[str, Any], progress: Progress) -> None:
    """Write an ordinary Lightning file with a manifest to `out`, atomically.

    Raises:
        CheckpointError: the disk is too full.
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
    """Return weights and optimizer states, tied ones once, with their values."""
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
    """Return a key that tied tensors share, whether they are stored in a folder or mapped from a file."""
    if isinstance(tensor, LazyTensor):
        locations = [stored.location for stored in tensor.chunks]
        return tuple(locations) if locations and None not in locations else id(tensor)
    return view_key(tensor)


def check_outside(out: Path, checkpoint: str | Path) -> None:
    """Raise a `ConfigurationError` if `out` is, or is in, the folder of `checkpoint` or of another checkpoint."""
    target = out.resolve()
    source = Path(checkpoint).resolve()
    for folder in (target, *target.parents):
        if (folder == source and source.exists()) or _is_checkpoint(folder):
            raise ConfigurationError(f"{out} is in the checkpoint {folder}, which must not change. Write elsewhere.")


def _is_checkpoint(folder: Path) -> bool:
    with suppress(OSError, ValueError):
        of_torch = (folder / METADATA).is_file()
        if of_torch and ((folder / FILE_NAME).is_file() or (folder / META).is_file() or any(folder.glob("*.distcp"))):
            return True
        return find_folder(folder) is not None
    return False
