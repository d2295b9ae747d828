"""From what Lightning dumps to what each rank writes."""

import re
from collections.abc import Collection, Iterator, Mapping, MutableMapping
from copy import copy
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_paral.checkpoint.io.checksums import checksum
from lightning_paral.checkpoint.layout import balanced_range
from lightning_paral.checkpoint.shards import NOTHING, Part, is_sharded, part_of, run_of
from lightning_paral.compat.torch.pytree import tree_leaves
from lightning_paral.distributed.agreement import RankGroup
from lightning_paral.errors import CheckpointError

TreePath = tuple[str | int, ...]


CURRENT_KEY = "current_model_state"
"""Where Lightning's WeightAveraging puts the weights, those in `state_dict` being averages."""

OF_WEIGHTS = ("state_dict", CURRENT_KEY)
"""Where a checkpoint has what `Module.state_dict` returns."""


@dataclass
class WriteItem:
    """A tensor of the checkpoint and this rank's part of it. All ranks have the same entries, in the same order."""

    path: TreePath
    shape: tuple[int, ...]
    dtype: torch.dtype
    part: Part
    aliases: list[TreePath] = field(default_factory=list)
    """Where the same tensor stands again: tied parameters."""
    writers: Literal["holders", "all", "first"] = "first"
    """Who has a part: the ranks that hold it, all ranks, or rank 0."""

    @property
    def nbytes(self) -> int:
        """Size of the whole tensor."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def is_large(key: str) -> bool:
    """Whether all tensors below this key of a checkpoint are entries: those of weights and of optimizers."""
    return key in (*OF_WEIGHTS, "optimizer_states") or re.fullmatch(r"optimizer_\d+", key) is not None


def plan(
    tree: Mapping[str, Any], ranks: RankGroup, replicated: set[int], differing: Collection[TreePath] = ()
) -> list[WriteItem]:
    """Decide which rank writes which part of the tensors in `tree`.

    What is divided is written by those who hold it, wherever in the checkpoint it is. What all ranks hold is divided
    evenly for the occasion: optimizer states, and weights whose storage is in `replicated` (by address). Other tensors,
    such as buffers and what hooks added, may differ between ranks; those of rank 0 count. So do those at the paths
    `differing`, which ranks were found to hold, but not alike.

    Raises:
        CheckpointError: a divided tensor is in a container other than dicts and lists.
    """
    entries: dict[Any, WriteItem] = {}
    shared: list[tuple[WriteItem, Tensor]] = []
    for path, value in _planned(tree):
        key = view_of(value)
        if key in entries:
            entries[key].aliases.append(path)
            continue
        entry = entries[key] = WriteItem(path, tuple(value.shape), value.dtype, NOTHING)
        if is_sharded(value):
            entry.part, entry.writers = part_of(value), "holders"
        elif _is_replicated(path, value, replicated) and path not in differing:
            entry.writers = "all"
            shared.append((entry, value))
        elif ranks.is_first:
            entry.part = part_of(value)
    if any(is_sharded(leaf) and id(leaf) not in entries for leaf in tree_leaves(tree)):
        raise CheckpointError(
            "A tensor of which ranks hold parts is in a tuple or a container of another type, and cannot be saved from "
            "there. Put it into a dict or a list."
        )
    nbytes = sum(entry.nbytes for entry, _ in shared)
    position = 0
    for entry, value in shared:
        start, stop = balanced_range(ranks.rank, ranks.world_size, nbytes, position, entry.dtype.itemsize)
        entry.part = run_of(value, start, stop)
        position += entry.nbytes
    return list(entries.values())


def copies_in(tree: Mapping[str, Any], replicated: set[int]) -> Iterator[tuple[TreePath, Tensor]]:
    """Return what ranks hold that others hold, too: tensors that `plan` divides, and DTensors that are replicated."""
    seen = set()
    for path, value in _planned(tree):
        key = view_of(value)
        if key in seen:
            continue
        seen.add(key)
        if isinstance(value, DTensor):
            if any(placement.is_replicate() for placement in value.placements):
                yield path, value
        elif not is_sharded(value) and _is_replicated(path, value, replicated):
            yield path, value


def _is_replicated(path: TreePath, value: Tensor, replicated: set[int]) -> bool:
    return path[0] not in OF_WEIGHTS or value.untyped_storage().data_ptr() in replicated


def _planned(tree: Mapping[str, Any]) -> Iterator[tuple[TreePath, Tensor]]:
    for key, value in tree.items():
        for path, tensor in tensors_in(value, (key,)):
            if is_large(key) or is_sharded(tensor):
                yield path, tensor


def check_same(entries: list[WriteItem], ranks: RankGroup) -> None:
    """Check that all ranks have planned to write the same tensors. *Collective*.

    Raises:
        CheckpointError: they have not; on all ranks. Written like that, tensors would get each other's bytes.
    """
    mine = [(entry.path, entry.aliases, entry.shape, str(entry.dtype), entry.writers) for entry in entries]
    sums = ranks.gather(checksum(repr(mine).encode()))
    if len(set(sums)) == 1:
        return
    plans = ranks.gather(mine)
    rank = next(rank for rank in range(ranks.world_size) if sums[rank] != sums[0])
    first, other = ({".".join(map(str, path)): about for path, *about in plans[number]} for number in (0, rank))
    names = sorted(name for name in first.keys() | other.keys() if first.get(name) != other.get(name))
    raise CheckpointError(
        f"Ranks 0 and {rank} do not save the same tensors: {', '.join(names[:8])}{', ...' if len(names) > 8 else ''}. "
        "What on_save_checkpoint changes in the state_dict and in optimizer states, it has to change on all ranks."
    )


def tensors_in(tree: Any, path: TreePath = ()) -> Iterator[tuple[TreePath, Tensor]]:
    """Return the tensors in nested dicts and lists, with their paths."""
    if isinstance(tree, Tensor):
        yield path, tree
    elif isinstance(tree, MutableMapping):
        for key, value in tree.items():
            yield from tensors_in(value, (*path, key))
    elif isinstance(tree, list):
        for number, value in enumerate(tree):
            yield from tensors_in(value, (*path, number))


def replace(tree: Any, values: Mapping[TreePath, Any], path: TreePath = ()) -> Any:
    """Return a copy of nested dicts and lists in which what stands at the paths of `values` is replaced."""
    if path in values:
        return values[path]
    if isinstance(tree, MutableMapping):
        changed = copy(tree)  # keeps what an OrderedDict carries beside its items, such as a state_dict's `_metadata`
        changed.update({key: replace(value, values, (*path, key)) for key, value in tree.items()})
        return changed
    if isinstance(tree, list):
        replaced = copy(tree)
        replaced[:] = [replace(value, values, (*path, number)) for number, value in enumerate(tree)]
        return replaced
    return tree


def view_of(value: Tensor) -> Any:
    """Return a key that is the same for tensors that are the same view of the same memory."""
    if is_sharded(value) or value.numel() == 0:
        return id(value)
    return value.data_ptr(), value.dtype, tuple(value.shape), value.stride(), value.is_conj(), value.is_neg()
