"""Plan a save: form the union of the tensors of all ranks, and divide each tensor among the ranks that have it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_paral.checkpoint.io.files import checksum
from lightning_paral.checkpoint.layout import balanced_range
from lightning_paral.checkpoint.replicas import Replica, find_differing
from lightning_paral.checkpoint.shards import NO_SHARD, FlatShard, LocalShard, flat_range, is_sharded, local_shard
from lightning_paral.checkpoint.tree import WEIGHT_KEYS, TreePath, is_state_key, tensors_in, view_key
from lightning_paral.compat.torch.tensors import tree_leaves
from lightning_paral.distributed.exchange import RankGroup
from lightning_paral.errors import CheckpointError


@dataclass
class WriteItem:
    """A tensor to write, and the shard of it that this rank writes. All ranks have the same items in the same order."""

    path: TreePath
    """The position of the tensor in the checkpoint."""
    shape: tuple[int, ...]
    """The shape of the full tensor."""
    dtype: torch.dtype
    shard: LocalShard
    """What this rank writes of the tensor."""
    aliases: list[TreePath] = field(default_factory=list)
    """Other paths of the same tensor, for tied parameters."""

    @property
    def nbytes(self) -> int:
        """The size of the full tensor in bytes."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class _Record:
    """The description of a tensor that a rank sends to the other ranks."""

    paths: tuple[TreePath, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: Literal["sharded", "replicated", "per rank"]
    """Whether the ranks that have the tensor have shards of it, equal values, or different values."""
    read_order: int
    """See `FlatShard`; 0 for other tensors."""


@dataclass
class _Planned:
    """A tensor of the union over all ranks."""

    record: _Record
    stages: list[int]
    """The pipeline stages whose ranks have the tensor, in ascending order."""
    value: Tensor | None = None
    """This rank's tensor or shard; `None` if it has none."""


def plan_save(
    tree: Mapping[str, Any],
    ranks: RankGroup,
    replicated: set[int],
    *,
    stages: Sequence[int] | None = None,
    averages_later: bool = False,
    what: str = "Saving",
) -> list[WriteItem]:
    """Decide which rank writes which elements of which tensor. *Collective* over `ranks`.

    - Sharded tensors (`DTensor`, `FlatShard`), anywhere in the tree: each rank writes its shard.
    - Optimizer states, and weights whose storage is in `replicated`: these are equal on all ranks that have them, and
      are divided evenly among those ranks.
    - Other tensors in weights and optimizer states, such as buffers, which may differ between ranks: the first rank
      that has the tensor writes it. The same applies to tensors of the second group whose replicas turn out to differ.

    The cost is two collectives of one number per rank. With several stages, one rank of each stage also broadcasts its
    list of tensors.

    Args:
        tree: the checkpoint of this rank: nested dicts and lists.
        ranks: the ranks that save together.
        replicated: the addresses of the storages of weights that are equal on all ranks that have them.
        stages: the pipeline stage of each of `ranks`, as in `ParallelDims.stages`; `None` if there is one stage. Ranks
            of one stage have the same tensors, full or sharded. Different stages may have some tensors in common.
        averages_later: whether replicas may differ because the weights are averaged only from time to time.
        what: the action, such as "Saving a.ckpt", for error messages.

    Raises:
        CheckpointError: ranks of one stage have different tensors; stages disagree on the shape, dtype or aliases of a
            tensor; or a sharded tensor is in a container other than dicts and lists. Raised on all ranks.
    """
    stages = [0] * ranks.world_size if stages is None else list(stages)
    assert len(stages) == ranks.world_size, "stages must have one number for each rank"
    local: list[tuple[_Record, Tensor]] = []

    def list_tensors() -> int:
        local.extend(_tensors_to_write(tree, replicated))
        return checksum(repr([record for record, _ in local]).encode())

    digests = ranks.gather_results(what, list_tensors)
    planned = _union([record for record, _ in local], digests, stages, ranks)
    values = {path: value for record, value in local for path in record.paths}
    for tensor in planned:
        tensor.value = next((values[path] for path in tensor.record.paths if path in values), None)
    replicas = [
        Replica(tensor.record.paths[0], tuple(tensor.stages), tensor.value)
        for tensor in planned
        if tensor.record.layout != "per rank" and tensor.value is not None
    ]
    differing = find_differing(replicas, ranks, averages_later, what)
    return _divide(planned, differing, stages, ranks)


def _tensors_to_write(tree: Mapping[str, Any], replicated: set[int]) -> list[tuple[_Record, Tensor]]:
    """Return the tensors of this rank that are part of the plan. Tied tensors occur once.

    Raises:
        CheckpointError: a sharded tensor is in a container other than dicts and lists.
    """
    found: dict[Any, tuple[list[TreePath], Tensor]] = {}
    for path, value in _planned_tensors(tree):
        found.setdefault(view_key(value), ([], value))[0].append(path)
    if any(is_sharded(leaf) and id(leaf) not in found for leaf in tree_leaves(tree)):
        raise CheckpointError(
            "A sharded tensor is in a tuple or in a container of a custom type, and cannot be saved from there. Put it "
            "into a dict or a list."
        )
    return [(_record_of(paths, value, replicated), value) for paths, value in found.values()]


def _planned_tensors(tree: Mapping[str, Any]) -> Iterator[tuple[TreePath, Tensor]]:
    for key, value in tree.items():
        for path, tensor in tensors_in(value, (key,)):
            if is_state_key(key) or is_sharded(tensor):
                yield path, tensor


def _record_of(paths: list[TreePath], value: Tensor, replicated: set[int]) -> _Record:
    layout: Literal["sharded", "replicated", "per rank"] = "per rank"
    if is_sharded(value):
        layout = "sharded"
    elif paths[0][0] not in WEIGHT_KEYS or value.untyped_storage().data_ptr() in replicated:
        layout = "replicated"
    read_order = value.read_order if isinstance(value, FlatShard) else 0
    return _Record(tuple(paths), tuple(value.shape), value.dtype, layout, read_order)


def _union(records: list[_Record], digests: list[int], stages: list[int], ranks: RankGroup) -> list[_Planned]:
    """Return the union of the tensors of all ranks, in the same order on all ranks. *Collective* if the lists differ.

    Args:
        records: the tensors of this rank.
        digests: the checksum of the list of each rank.
        stages: the pipeline stage of each rank.
        ranks: the ranks that save together.

    Raises:
        CheckpointError: ranks disagree on a tensor.
    """
    first_ranks = {stage: stages.index(stage) for stage in sorted(set(stages))}
    if len(set(digests)) == 1:
        return [_Planned(record, list(first_ranks)) for record in records]
    for rank, digest in enumerate(digests):
        first = first_ranks[stages[rank]]
        if digest != digests[first]:
            raise _disagreement(first, rank, ranks.broadcast(records, first), ranks.broadcast(records, rank))
    lists: dict[int, list[_Record]] = {}
    planned: list[_Planned] = []
    index_of: dict[TreePath, int] = {}
    for stage, rank in first_ranks.items():
        if digests[rank] not in lists:
            lists[digests[rank]] = ranks.broadcast(records, rank)
        stage_records = lists[digests[rank]]
        seen: set[int] = set()
        for record in stage_records:
            known = {index_of[path] for path in record.paths if path in index_of}
            index = known.pop() if known else len(planned)
            if index == len(planned):
                planned.append(_Planned(record, []))
            merged = _merge_records(planned[index].record, record)
            # The stages disagree on aliases if one of them ties tensors that are separate in another.
            if known or index in seen or merged is None:
                other = first_ranks[planned[index].stages[0]]
                raise _disagreement(other, rank, lists[digests[other]], stage_records, only=record.paths)
            planned[index].record = merged
            planned[index].stages.append(stage)
            index_of.update(dict.fromkeys(record.paths, index))
            seen.add(index)
    return planned


def _merge_records(first: _Record, second: _Record) -> _Record | None:
    """Return one record for a tensor that two stages have; `None` if their records do not match."""
    if (first.shape, first.dtype, first.layout) != (second.shape, second.dtype, second.layout):
        return None
    paths = tuple(dict.fromkeys((*first.paths, *second.paths)))
    return _Record(paths, first.shape, first.dtype, first.layout, first.read_order)


def _disagreement(
    first: int, second: int, first_records: list[_Record], second_records: list[_Record], only: Sequence[TreePath] = ()
) -> CheckpointError:
    """Return an error that names the tensors on which two ranks disagree: those with the paths `only`, if given."""
    one, other = (
        {".".join(map(str, record.paths[0])): record for record in records}
        for records in (first_records, second_records)
    )
    names = sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))
    if only:
        names = [".".join(map(str, only[0]))]
    return CheckpointError(
        f"Ranks {first} and {second} do not save the same tensors: {', '.join(names[:8])}"
        f"{', ...' if len(names) > 8 else ''}. "
        "If on_save_checkpoint changes the state_dict or optimizer states, it must make the same changes on all ranks."
    )


def _divide(planned: list[_Planned], differing: set[TreePath], stages: list[int], ranks: RankGroup) -> list[WriteItem]:
    """Return the items, each with the shard that this rank writes."""
    rank = ranks.rank
    items: list[tuple[int, WriteItem]] = []
    replicated: dict[tuple[int, ...], list[tuple[WriteItem, Tensor | None]]] = {}
    for tensor in planned:
        record, value = tensor.record, tensor.value
        item = WriteItem(record.paths[0], record.shape, record.dtype, NO_SHARD, list(record.paths[1:]))
        items.append((record.read_order, item))
        holders = tuple(number for number, stage in enumerate(stages) if stage in tensor.stages)
        if record.layout == "sharded":
            if value is not None and stages[rank] == tensor.stages[0]:
                item.shard = local_shard(value)
        elif record.layout == "replicated" and item.path not in differing:
            replicated.setdefault(holders, []).append((item, value))
        elif value is not None and rank == holders[0]:
            item.shard = local_shard(value)
    for holders, tensors in replicated.items():
        if rank not in holders:
            continue
        nbytes, position = sum(item.nbytes for item, _ in tensors), 0
        for item, value in tensors:
            assert value is not None, "holders have the tensor"
            itemsize = item.dtype.itemsize
            start, stop = balanced_range(holders.index(rank), len(holders), nbytes, position, itemsize)
            item.shard = flat_range(value, start, stop)
            position += item.nbytes
    items.sort(key=lambda pair: pair[0])  # tensors stored together are read together, so a file on NVMe is read once
    return [item for _, item in items]
