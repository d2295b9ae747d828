"""The tensors of a checkpoint, and which rank writes what of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_paral.checkpoint.layout import Chunk, coverage_fault
from lightning_paral.checkpoint.shards import NO_SHARD, FlatShard, LocalShard, is_sharded, local_shard
from lightning_paral.checkpoint.tree import TreePath, is_state_key, tensors_in, view_key
from lightning_paral.compat.torch.tensors import tree_leaves
from lightning_paral.errors import CheckpointError


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
