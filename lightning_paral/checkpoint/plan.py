"""From what Lightning dumps to what each rank writes."""

from collections.abc import Iterator, Mapping
from copy import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_paral.checkpoint.geometry import share_of
from lightning_paral.checkpoint.held import NOTHING, Part, is_divided, part_of, run_of
from lightning_paral.checkpoint.ranks import Ranks

Path = tuple[str | int, ...]


@dataclass
class Entry:
    """A tensor of the checkpoint and this rank's part of it. All ranks have the same entries, in the same order."""

    path: Path
    shape: tuple[int, ...]
    dtype: torch.dtype
    part: Part
    twins: list[Path] = field(default_factory=list)
    """Where the same tensor stands again: tied parameters."""

    @property
    def nbytes(self) -> int:
        """Size of the whole tensor."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def plan(tree: Mapping[str, Any], ranks: Ranks, replicated: set[int]) -> list[Entry]:
    """Decide which rank writes which part of the tensors in `tree`.

    What is divided is written by those who hold it. What all ranks hold is divided evenly for the occasion: optimizer
    states, and weights whose storage is in `replicated` (by address). Other tensors, such as buffers and what hooks
    added, may differ between ranks; those of rank 0 count.
    """
    entries: dict[Any, Entry] = {}
    shared: list[tuple[Entry, Tensor]] = []
    for path, value in tensors_in(tree):
        key = _identity(value)
        if key in entries:
            entries[key].twins.append(path)
            continue
        entry = entries[key] = Entry(path, tuple(value.shape), value.dtype, NOTHING)
        if is_divided(value):
            entry.part = part_of(value)
        elif path[0] != "state_dict" or value.untyped_storage().data_ptr() in replicated:
            shared.append((entry, value))
        elif ranks.is_first:
            entry.part = part_of(value)
    nbytes = sum(entry.nbytes for entry, _ in shared)
    position = 0
    for entry, value in shared:
        start, stop = share_of(ranks.rank, ranks.world_size, nbytes, position, entry.dtype.itemsize)
        entry.part = run_of(value, start, stop)
        position += entry.nbytes
    return list(entries.values())


def tensors_in(tree: Any, path: Path = ()) -> Iterator[tuple[Path, Tensor]]:
    """Return the tensors in nested dicts and lists, with their paths."""
    if isinstance(tree, Tensor):
        yield path, tree
    elif isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from tensors_in(value, (*path, key))
    elif isinstance(tree, list | tuple):
        for number, value in enumerate(tree):
            yield from tensors_in(value, (*path, number))


def replace(tree: Any, values: Mapping[Path, Any], path: Path = ()) -> Any:
    """Return a copy of nested dicts and lists in which what stands at the paths of `values` is replaced."""
    if path in values:
        return values[path]
    if isinstance(tree, dict):
        changed = copy(tree)  # keeps what an OrderedDict carries beside its items, such as a state_dict's `_metadata`
        changed.update({key: replace(value, values, (*path, key)) for key, value in tree.items()})
        return changed
    if type(tree) in (list, tuple):
        return type(tree)(replace(value, values, (*path, number)) for number, value in enumerate(tree))
    return tree


def _identity(value: Tensor) -> Any:
    if is_divided(value) or value.numel() == 0:
        return id(value)
    return value.data_ptr(), value.dtype, tuple(value.shape), value.stride()
