"""Plan a save: the union of the tensors that the ranks hold, each divided among the ranks that hold it."""

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
from lightning_paral.compat.torch.pytree import tree_leaves
from lightning_paral.distributed.agreement import RankGroup
from lightning_paral.errors import CheckpointError


@dataclass
class WriteItem:
    """A tensor of the checkpoint and this rank's shard of it. All ranks have the same items in the same order."""

    path: TreePath
    shape: tuple[int, ...]
    dtype: torch.dtype
    shard: LocalShard
    aliases: list[TreePath] = field(default_factory=list)
    """Further paths of the same tensor: tied parameters."""

    @property
    def nbytes(self) -> int:
        """Size of the full tensor."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class _Record:
    """What a rank tells the others about a tensor that it holds."""

    paths: tuple[TreePath, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: Literal["sharded", "replicated", "per rank"]
    """Whether the ranks that hold the tensor have shards, the same values, or values of their own."""
    read_order: int


@dataclass
class _Planned:
    """A tensor of the union over all ranks."""

    record: _Record
    stages: list[int]
    """The stages whose ranks hold the tensor, in ascending order."""
    value: Tensor | None = None
    """The tensor or shard of this rank, if it holds one."""


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

    Sharded tensors (DTensor, `FlatShard`) are written by the ranks that hold the shards, wherever they are in the tree.
    Optimizer states, and weights whose storage is in `replicated`, are the same on all ranks that hold them, and are
    divided evenly among those. Other tensors below weights and optimizer states, such as buffers, may differ between
    ranks: the first rank that holds them writes its own, as it does of replicas that are found to differ.

    The cost is two collectives of one number per rank. With several stages, one rank of each also broadcasts its list.

    Args:
        tree: the checkpoint of this rank, nested dicts and lists.
        ranks: the ranks that save together.
        replicated: addresses of the storages of weights that are the same on all ranks that hold them.
        stages: the pipeline stage of each of `ranks`, as `ParallelDims.stages`. Ranks of one stage hold the same
            tensors, full or sharded; stages hold different tensors and may have some in common. `None`: there is one.
        averages_later: whether the ranks train apart and average their weights from time to time.
        what: what failed, for errors.

    Raises:
        CheckpointError: ranks of one stage hold different tensors, stages disagree on the shape, dtype or aliases of a
            tensor, or a sharded tensor is in a container other than dicts and lists; on all ranks.
    """
    stages = [0] * ranks.world_size if stages is None else list(stages)
    assert len(stages) == ranks.world_size, "stages has one number for each rank"
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
    return _divide(planned, differing, stages, ranks.rank)


def _tensors_to_write(tree: Mapping[str, Any], replicated: set[int]) -> list[tuple[_Record, Tensor]]:
    """Return the tensors that this rank holds, tied ones once.

    Raises:
        CheckpointError: a sharded tensor is in a container other than dicts and lists.
    """
    found: dict[Any, tuple[list[TreePath], Tensor]] = {}
    for path, value in _planned_tensors(tree):
        found.setdefault(view_key(value), ([], value))[0].append(path)
    if any(is_sharded(leaf) and id(leaf) not in found for leaf in tree_leaves(tree)):
        raise CheckpointError(
            "A sharded tensor is in a tuple or a container of another type, and cannot be saved from there. Put it "
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
    """Return the tensors of all ranks, in the same order on all of them. *Collective* if their lists differ.

    Raises:
        CheckpointError: ranks do not agree on a tensor.
    """
    first_of = {stage: stages.index(stage) for stage in sorted(set(stages))}
    if len(set(digests)) == 1:
        return [_Planned(record, list(first_of)) for record in records]
    for rank, digest in enumerate(digests):
        first = first_of[stages[rank]]
        if digest != digests[first]:
            raise _disagreement(first, rank, ranks.broadcast(records, first), ranks.broadcast(records, rank))
    lists: dict[int, list[_Record]] = {}
    planned: list[_Planned] = []
    at: dict[TreePath, int] = {}
    for stage, rank in first_of.items():
        if digests[rank] not in lists:
            lists[digests[rank]] = ranks.broadcast(records, rank)
        of_stage = lists[digests[rank]]
        seen: set[int] = set()
        for record in of_stage:
            known = {at[path] for path in record.paths if path in at}
            number = known.pop() if known else len(planned)
            if number == len(planned):
                planned.append(_Planned(record, []))
            merged = _merge_records(planned[number].record, record)
            if known or number in seen or merged is None:
                other = first_of[planned[number].stages[0]]
                raise _disagreement(other, rank, lists[digests[other]], of_stage, only=record.paths)
            planned[number].record = merged
            planned[number].stages.append(stage)
            at.update(dict.fromkeys(record.paths, number))
            seen.add(number)
    return planned


def _merge_records(first: _Record, second: _Record) -> _Record | None:
    """Return the record of a tensor that two stages hold; `None` if they do not hold the same."""
    if (first.shape, first.dtype, first.layout) != (second.shape, second.dtype, second.layout):
        return None
    paths = tuple(dict.fromkeys((*first.paths, *second.paths)))
    return _Record(paths, first.shape, first.dtype, first.layout, first.read_order)


def _disagreement(
    first: int, second: int, of_first: list[_Record], of_second: list[_Record], only: Sequence[TreePath] = ()
) -> CheckpointError:
    one, other = (
        {".".join(map(str, record.paths[0])): record for record in records} for records in (of_first, of_second)
    )
    names = sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))
    if only:
        names = [".".join(map(str, only[0]))]
    return CheckpointError(
        f"Ranks {first} and {second} do not save the same tensors: {', '.join(names[:8])}"
        f"{', ...' if len(names) > 8 else ''}. "
        "What on_save_checkpoint changes in the state_dict and in optimizer states, it has to change on all ranks."
    )


def _divide(planned: list[_Planned], differing: set[TreePath], stages: list[int], rank: int) -> list[WriteItem]:
    """Return the items with this rank's shards."""
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
    for holders, of_holders in replicated.items():
        if rank not in holders:
            continue
        nbytes, position = sum(item.nbytes for item, _ in of_holders), 0
        for item, value in of_holders:
            assert value is not None, "a holder has the tensor"
            itemsize = item.dtype.itemsize
            start, stop = balanced_range(holders.index(rank), len(holders), nbytes, position, itemsize)
            item.shard = flat_range(value, start, stop)
            position += item.nbytes
    items.sort(key=lambda pair: pair[0])  # stable: tensors stored together are read together, from NVMe only once
    return [item for _, item in items]
