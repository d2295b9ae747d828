"""From any checkpoint to one Lightning file, in constant memory: one tensor at a time."""

import shutil
from collections.abc import Callable, Iterator
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_paral.checkpoint.formats.full import write_all, write_skeleton
from lightning_paral.checkpoint.io.atomic import AtomicPath
from lightning_paral.checkpoint.io.checksums import BlockChecksums, FileRecord, reader_of
from lightning_paral.checkpoint.io.writeback import BackgroundFsync
from lightning_paral.checkpoint.lazy_tensor import stretches
from lightning_paral.checkpoint.manifest import Manifest, embed
from lightning_paral.checkpoint.save_plan import CURRENT_KEY, OF_WEIGHTS, WriteItem, tensors_in, view_of
from lightning_paral.checkpoint.shards import NOTHING, bytes_of
from lightning_paral.errors import CheckpointError

Progress = Callable[[int], None]
"""Called with the number of bytes written since the last call."""

STEP_BYTES = 2**22
"""How much is read and written at a time."""


def select(checkpoint: dict[str, Any], *, weights_only: bool, dtype: torch.dtype | None) -> dict[str, Any]:
    """Return what is to be written of `checkpoint`, and of which dtypes: tensors that have not been read stay so."""
    kept = dict(checkpoint)
    if weights_only:
        of_training = ("optimizer_states", "lr_schedulers", "callbacks", CURRENT_KEY, "averaging_state")
        kept = {key: value for key, value in kept.items() if key not in of_training}
    if dtype is not None:
        kept["state_dict"] = type(kept["state_dict"])(
            (name, Cast(value, dtype) if isinstance(value, Tensor) and value.is_floating_point() else value)
            for name, value in kept["state_dict"].items()
        )
    return kept


class Cast:
    """A tensor that is to be written in another dtype."""

    def __init__(self, tensor: Tensor, dtype: torch.dtype) -> None:
        self.tensor = tensor
        self.dtype = dtype


def check_free_space(folder: Path, needed_bytes: int) -> None:
    """Raise a `CheckpointError` if the disk of `folder` has less free than what is to be written there."""
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < needed_bytes:
        raise CheckpointError(
            f"The output will have {needed_bytes / 1e9:.2f} GB, and {free_bytes / 1e9:.2f} GB are free in {folder}. "
            "Make room, or write elsewhere."
        )


def size_of(checkpoint: dict[str, Any]) -> int:
    """Return the number of bytes of all tensors in `checkpoint`, tied ones once."""
    return sum(entry.nbytes for entry, _ in entries_of(checkpoint))


def write_file(checkpoint: dict[str, Any], out: Path, about: dict[str, Any], progress: Progress) -> None:
    """Write an ordinary Lightning file, with a manifest; all of it or nothing."""
    pairs = entries_of(checkpoint)
    check_free_space(out.parent, sum(entry.nbytes for entry, _ in pairs))
    entries = [entry for entry, _ in pairs]
    draft = AtomicPath(out, folder=False)
    try:
        offsets = write_skeleton(checkpoint, entries, draft.path)
        checksums = BlockChecksums()
        with open(draft.path, "r+b") as file:
            read, write = reader_of(file.fileno()), partial(write_all, file.fileno())
            with BackgroundFsync(file.fileno()) as flushing:
                for offset, (entry, tensor) in sorted(zip(offsets, pairs, strict=True), key=itemgetter(0)):
                    checksums.catch_up(read, offset)
                    for values in stretches(tensor, STEP_BYTES):
                        data = bytes_of(values.to(entry.dtype))
                        write(data, checksums.position)
                        checksums.update(data)
                        flushing.wrote(len(data))
                        progress(len(data))
                flushing.finish()

            def record(nbytes: int) -> FileRecord:
                checksums.catch_up(read, nbytes)
                return checksums.record()

            embed(draft.path, lambda nbytes: Manifest(files={".": record(nbytes)}, **about))
        draft.commit()
    except BaseException:
        draft.discard()
        raise


def entries_of(checkpoint: dict[str, Any]) -> list[tuple[WriteItem, Tensor]]:
    """Return weights and optimizer states, tied ones once, with where they stand and their values."""
    found: dict[Any, tuple[WriteItem, Tensor]] = {}
    large = {key: checkpoint[key] for key in (*OF_WEIGHTS, "optimizer_states") if key in checkpoint}
    for path, value in _tensors_and_casts(large):
        tensor = value.tensor if isinstance(value, Cast) else value
        key = _identity(tensor)
        if key in found:
            found[key][0].aliases.append(path)
        else:
            found[key] = (WriteItem(path, tuple(tensor.shape), value.dtype, NOTHING), tensor)
    return list(found.values())


def _tensors_and_casts(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    if isinstance(tree, Cast):
        yield path, tree
    elif isinstance(tree, dict):
        for key, value in tree.items():
            yield from _tensors_and_casts(value, (*path, key))
    else:
        yield from tensors_in(tree, path)


def _identity(tensor: Any) -> Any:
    pieces = getattr(tensor, "pieces", None)
    if pieces is not None:
        places = [piece.place for piece in pieces]
        return tuple(places) if places and None not in places else id(tensor)
    return view_of(tensor)
