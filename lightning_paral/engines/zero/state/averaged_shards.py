"""Averages of weights under ZeRO: each rank averages its flat ranges of the parameters.

At stages 1 and 2 every rank computes with full weights, but averages only the ranges that it updates. The ranks
all-gather the averages before an evaluation that uses them, and when the averages become the weights.
"""

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module

from lightning_paral.checkpoint.lazy_tensor import read_flat_range
from lightning_paral.checkpoint.sharded_state import WeightShards
from lightning_paral.checkpoint.shards import FlatShard, identity
from lightning_paral.engines.zero.parameters.partition import (
    full_numel,
    full_shape,
    is_partitioned,
    is_stage3_parameter,
    local_shard,
    write_partitions,
)
from lightning_paral.engines.zero.parameters.watched import plain_data
from lightning_paral.engines.zero.parameters.writes import Writes

if TYPE_CHECKING:
    from lightning_paral.engines.zero.state.zero_state import ZeroState

_BUCKET_NUMEL = 2**24
"""The approximate number of elements per all-gather."""


class ZeroWeightShards(WeightShards):
    """Implements `WeightShards` for a fit. Construction is *collective* over the world: ranks exchange flat ranges.

    Args:
        module: the module whose parameters are averaged.
        state: the state with the weights and master copies.
        writes: the record of what user code writes to parameters.
    """

    def __init__(self, module: Module, state: "ZeroState", writes: Writes) -> None:
        self._parameters: list[Any] = list(module.parameters())
        self._state = state
        self._writes = writes
        self._ranges = [state.local_flat_range(parameter) for parameter in self._parameters]
        self._ranges_by_rank: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(self._ranges_by_rank, self._ranges)

    def prepare(self) -> None:
        """Copy the values that user code wrote to parameters into DeepSpeed's own copies of them."""
        self._writes.collect()

    def current(self) -> list[Tensor]:
        """Return this rank's flat ranges of the weights that forward passes use, as 1-dimensional tensors."""
        self._writes.collect_from_copies()
        return [self._shard(parameter, *own) for parameter, own in zip(self._parameters, self._ranges, strict=True)]

    def _shard(self, parameter: Any, start: int, numel: int) -> Tensor:
        if is_stage3_parameter(parameter):
            return local_shard(parameter)
        return plain_data(parameter).view(-1)[start : start + numel]

    def publish(self, *, borrowed: bool) -> None:
        """Use the current values in forward passes: full parameters get the flat ranges of all ranks. *Collective*.

        Args:
            borrowed: whether the values are averages for an evaluation, after which the weights are restored.
        """
        full = [number for number, parameter in enumerate(self._parameters) if not is_partitioned(parameter)]
        for bucket in self._buckets(full):
            self._gather(bucket)
        # User code may write to borrowed weights. These values must not reach the master copies.
        self._writes.set_write_back(write_partitions if borrowed else self._state.write_full_values)
        self._writes.mark_unwritten()

    def _buckets(self, numbers: list[int]) -> Iterator[list[int]]:
        """Divide parameters, given by index, into buckets of one dtype and device."""
        by_type: dict[Any, list[int]] = {}
        for number in numbers:
            parameter = self._parameters[number]
            by_type.setdefault((parameter.dtype, parameter.device), []).append(number)
        for same_type in by_type.values():
            bucket: list[int] = []
            numel = 0
            for number in same_type:
                bucket.append(number)
                numel += full_numel(self._parameters[number])
                if numel >= _BUCKET_NUMEL:
                    yield bucket
                    bucket, numel = [], 0
            if bucket:
                yield bucket

    def _gather(self, numbers: list[int]) -> None:
        """All-gather the flat ranges of a bucket of parameters. *Collective*."""
        size = max(sum(ranges[number][1] for number in numbers) for ranges in self._ranges_by_rank)
        shards = [self._shard(self._parameters[number], *self._ranges[number]) for number in numbers]
        device = plain_data(self._parameters[numbers[0]]).device
        flat = torch.zeros(size, dtype=shards[0].dtype, device=device)
        torch.cat([shard.to(device) for shard in shards], out=flat[: sum(len(shard) for shard in shards)])
        gathered = [torch.empty_like(flat) for _ in self._ranges_by_rank]
        dist.all_gather(gathered, flat)
        for values, ranges in zip(gathered, self._ranges_by_rank, strict=True):
            position = 0
            for number in numbers:
                start, numel = ranges[number]
                full = plain_data(self._parameters[number]).view(-1)
                full[start : start + numel].copy_(values[position : position + numel])
                position += numel

    def keep(self) -> None:
        """Make the current values the weights of the module, also in its master copies."""
        self._state.write_flat_ranges(list(zip(self._parameters, self.current(), strict=True)))

    def as_saved(self, number: int, average: Tensor) -> Tensor:
        """Return the average of parameter `number` for a checkpoint: full, or as a `FlatShard` if it is sharded."""
        parameter = self._parameters[number]
        start, numel = self._ranges[number]
        shape = full_shape(parameter)
        is_sharded = any(ranges[number] != self._ranges[number] for ranges in self._ranges_by_rank)
        if numel == full_numel(parameter) and not is_sharded:
            return average.view(shape)
        return FlatShard(shape, average.dtype, start, numel, partial(identity, average))

    def read(self, number: int, stored: Tensor, average: Tensor) -> None:
        """Copy this rank's flat range of `stored` into `average`."""
        read_flat_range(stored, self._ranges[number][0], average)

    def has_master(self, number: int) -> bool:
        """Return whether a checkpoint holds the fp32 master copy of parameter `number`."""
        return self._state.has_master(self._parameters[number])
