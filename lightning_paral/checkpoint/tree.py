"""Nested dicts and lists of a checkpoint: find, replace and insert values by path, and list the tensors to save."""

import io
import re
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_paral.checkpoint.layout import Chunk, coverage_fault
from lightning_paral.checkpoint.shards import NO_SHARD, FlatShard, LocalShard, is_sharded, local_shard
from lightning_paral.compat.torch.tensors import tree_leaves
from lightning_paral.errors import CheckpointError

TreePath = tuple[str | int, ...]
"""Keys of dicts and indices of lists, from the outermost container inwards."""

CURRENT_KEY = "current_model_state"
"""Key under which Lightning's `WeightAveraging` saves the weights; `state_dict` then contains their averages."""

PACKAGE_STATE_KEY = "lightning_paral"
"""Key in a checkpoint for the state that only this package reads: the names of frozen parameters that were not saved,
random states, and descriptions of Hugging Face models."""

WEIGHT_KEYS = ("state_dict", CURRENT_KEY)
"""Keys of a checkpoint whose values are results of `Module.state_dict`."""


def is_state_key(key: str) -> bool:
    """Return whether a checkpoint has weights or optimizer states under `key`: all their tensors are saved apart."""
    return key in (*WEIGHT_KEYS, "optimizer_states") or re.fullmatch(r"optimizer_\d+", key) is not None


def leaves(tree: Any, path: TreePath = ()) -> Iterator[tuple[TreePath, Any]]:
    """Yield the leaves of nested dicts and lists, each with its path. They are those of Distributed Checkpoint.

    An extra state in a `state_dict` is one leaf, with its tensors, unless some of them are sharded.
    """
    if len(path) == 2 and path[0] in WEIGHT_KEYS and not any(map(is_sharded, tree_leaves(tree))):
        yield path, tree
    elif isinstance(tree, MutableMapping):
        for key, value in tree.items():
            yield from leaves(value, (*path, key))
    elif isinstance(tree, list) and any(isinstance(value, MutableMapping | list | Tensor) for value in tree):
        for number, value in enumerate(tree):
            yield from leaves(value, (*path, number))
    else:
        yield path, tree


def tensors_in(tree: Any, path: TreePath = ()) -> Iterator[tuple[TreePath, Tensor]]:
    """Yield the tensors in nested dicts and lists, each with its path."""
    return ((place, leaf) for place, leaf in leaves(tree, path) if isinstance(leaf, Tensor))


def replace_at(tree: Any, values: Mapping[TreePath, Any], path: TreePath = ()) -> Any:
    """Return a copy of nested dicts and lists in which the values at the paths in `values` are replaced.

    Args:
        tree: nested dicts and lists, which are not changed.
        values: the new values by path.
        path: the path of `tree`, for the recursion.
    """
    if path in values:
        return values[path]
    if isinstance(tree, MutableMapping):
        changed = copy(tree)  # preserves attributes of an OrderedDict, such as `_metadata` of a state_dict
        for key, value in tree.items():  # not `update`, which adds in a `Counter`
            changed[key] = replace_at(value, values, (*path, key))
        return changed
    if isinstance(tree, list):
        replaced = copy(tree)
        replaced[:] = [replace_at(value, values, (*path, number)) for number, value in enumerate(tree)]
        return replaced
    return tree


def insert(tree: dict[str, Any], path: TreePath, value: Any, gaps_left: list[int]) -> None:
    """Set the value at `path`, creating missing dicts and lists. An int in `path` is an index of a list.

    Args:
        tree: the outermost dict, changed in place.
        path: the path at which to set `value`.
        value: any object.
        gaps_left: a list with one number, which several calls share and decrease: how many list elements they may still
            create without a value, because an index skips them.

    Raises:
        ValueError: an index skips more list elements than `gaps_left` allows.
        TypeError: a value in `path` is neither a dict nor a list.
    """
    container: Any = tree
    step: Any
    for step, next_step in zip(path, (*path[1:], None), strict=True):
        if isinstance(container, list):
            if not isinstance(step, int):
                raise TypeError(f"{step!r:.100} is not an index of a list")
            gaps_left[0] -= max(0, step - len(container))
            if gaps_left[0] < 0:
                raise ValueError(f"index {step} is too large")
            container.extend([None] * (step + 1 - len(container)))
        elif not isinstance(container, dict):
            raise TypeError(f"{step!r:.100} is in a {type(container).__name__}")
        if next_step is None:
            container[step] = value
            return
        inner = container[step] if isinstance(container, list) or step in container else None
        if inner is None:
            inner = container[step] = [] if isinstance(next_step, int) else {}
        container = inner


def serialized(value: Any) -> bytes:
    """Return what `torch.save` writes for `value`."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def host_copy(tree: Any) -> Any:
    """Return a copy of `tree` with its tensors on the host. The copies share memory if the originals do."""
    return torch.load(io.BytesIO(serialized(tree)), map_location="cpu", weights_only=False)


def view_key(value: Tensor) -> Any:
    """Return a key that is equal for two tensors if they are the same view of the same memory."""
    if is_sharded(value) or value.is_meta or value.numel() == 0:
        return id(value)
    return value.data_ptr(), value.dtype, tuple(value.shape), value.stride(), value.is_conj(), value.is_neg()


def name_of(path: TreePath) -> str:
    """Return the name of the value at `path`, which is its key in a Distributed Checkpoint."""
    return ".".join(map(str, path))


@dataclass
class SavedTensor:
    """A tensor of a checkpoint, and the part of it that this rank writes."""

    paths: tuple[TreePath, ...]
    """Its positions in the checkpoint; several for tied parameters."""
    shape: tuple[int, ...]
    """The shape of the full tensor."""
    dtype: torch.dtype
    shard: LocalShard
    """The elements that this rank writes."""

    @property
    def name(self) -> str:
        """Its first position, for messages."""
        return name_of(self.paths[0])

    @property
    def kind(self) -> "Kind":
        """Its shape and dtype."""
        return self.shape, self.dtype

    @property
    def nbytes(self) -> int:
        """The size of the full tensor in bytes."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def tensors_to_save(tree: Mapping[str, Any], *, writes_full: bool, is_merged: bool = False) -> list[SavedTensor]:
    """Return the weights, the optimizer states and all sharded tensors of a checkpoint. Tied tensors occur once.

    A rank writes its shards of sharded tensors; of several replicas of a shard, the lowest rank writes it. Not a
    collective.

    Args:
        tree: the checkpoint of this rank: nested dicts and lists.
        writes_full: whether this rank writes the tensors that each rank has in full: whether it is the lowest rank of
            its pipeline stage.
        is_merged: whether tensors on the meta device stand for those that only other pipeline stages have.

    Raises:
        CheckpointError: a sharded tensor is in a container other than dicts and lists, or a tensor has no values.
    """
    found: dict[Any, tuple[list[TreePath], Tensor]] = {}
    for key, value in tree.items():
        for path, tensor in tensors_in(value, (key,)):
            if tensor.is_meta and is_state_key(key) and not is_merged:
                raise CheckpointError(f"{name_of(path)} has no values to save: it is on the meta device.")
            if is_state_key(key) or is_sharded(tensor) or (tensor.is_meta and is_merged):
                found.setdefault(view_key(tensor), ([], tensor))[0].append(path)
    if any(is_sharded(leaf) and id(leaf) not in found for leaf in tree_leaves(tree)):
        raise CheckpointError(
            "A sharded tensor is in a tuple or in a container of a custom type, and cannot be saved from there. Put it "
            "into a dict or a list."
        )
    # Tensors that are stored together are read together, so that a file on NVMe is read once.
    ordered = sorted(found.values(), key=lambda pair: pair[1].read_order if isinstance(pair[1], FlatShard) else 0)
    return [
        SavedTensor(
            tuple(paths),
            tuple(value.shape),
            value.dtype,
            local_shard(value) if is_sharded(value) or (writes_full and not value.is_meta) else NO_SHARD,
        )
        for paths, value in ordered
    ]


Kind = tuple[tuple[int, ...], torch.dtype]
"""The shape and dtype of a tensor."""


def check_shards(name: str, kinds: Sequence[Kind], chunks: Sequence[Chunk]) -> None:
    """Check that what the ranks write of a tensor fits together.

    Args:
        name: the name of the tensor, for the message.
        kinds: the shape and dtype that the tensor has on each rank that writes any of it.
        chunks: the chunks that all of them write.

    Raises:
        CheckpointError: the kinds differ, or the chunks leave gaps or overlap.
    """
    fault = "their shapes or dtypes differ" if len(set(kinds)) > 1 else coverage_fault(kinds[0][0], chunks)
    if fault is not None:
        raise CheckpointError(
            f"The shards of {name} on different ranks do not fit together: {fault}. If on_save_checkpoint changes the "
            "state_dict or optimizer states, it must make the same changes on all ranks."
        )
