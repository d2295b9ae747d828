"""This rank's shards of the weights under ZeRO, for averages of them: flat ranges of parameters.

At stages 1 and 2 every rank computes with full weights. It averages the ranges that it updates, and the ranks exchange
these averages when they are evaluated or become the weights.
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

_GATHERED_NUMEL = 2**24
"""Elements gathered at a time, about."""


class ZeroWeightShards(WeightShards):
    """Implements `WeightShards` for a fit. *Collective* over the world: the ranks exchange their flat ranges.

    Args:
        module: whose parameters are averaged.
        state: where weights and master copies are kept.
        writes: records what user code writes to parameters.
    """

    def __init__(self, module: Module, state: "ZeroState", writes: Writes) -> None:
        self._parameters: list[Any] = list(module.parameters())
        self._state = state
        self._writes = writes
        self._ranges = [state.local_flat_range(parameter) for parameter in self._parameters]
        self._ranges_by_rank: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(self._ranges_by_rank, self._ranges)

    def prepare(self) -> None:
        """Bring what user code wrote to parameters to where DeepSpeed keeps the values."""
        self._writes.collect()

    def current(self) -> list[Tensor]:
        """Return this rank's flat ranges of the weights that are computed with, 1-dimensional."""
        self._writes.collect_from_copies()
        return [self._shard(parameter, *own) for parameter, own in zip(self._parameters, self._ranges, strict=True)]

    def _shard(self, parameter: Any, start: int, numel: int) -> Tensor:
        if is_stage3_parameter(parameter):
            return local_shard(parameter)
        return plain_data(parameter).view(-1)[start : start + numel]

    def publish(self, *, borrowed: bool) -> None:
        """Compute with the current values: full parameters get the flat ranges of all ranks. *Collective*."""
        full = [number for number, each in enumerate(self._parameters) if not is_partitioned(each)]
        for bucket in self._buckets(full):
            self._gather(bucket)
        # What an evaluation writes to weights is dropped after it with the averages, and must not reach the masters.
        self._writes.set_write_back(write_partitions if borrowed else self._state.write_full_values)
        self._writes.mark_unwritten()

    def _buckets(self, numbers: list[int]) -> Iterator[list[int]]:
        by_type: dict[Any, list[int]] = {}
        for number in numbers:
            parameter = self._parameters[number]
            by_type.setdefault((parameter.dtype, parameter.device), []).append(number)
        for alike in by_type.values():
            bucket: list[int] = []
            numel = 0
            for number in alike:
                bucket.append(number)
                numel += full_numel(self._parameters[number])
                if numel >= _GATHERED_NUMEL:
                    yield bucket
                    bucket, numel = [], 0
            if bucket:
                yield bucket

    def _gather(self, numbers: list[int]) -> None:
        """All-gather the flat ranges of full parameters, all of one dtype and device."""
        size = max(sum(ranges[number][1] for number in numbers) for ranges in self._ranges_by_rank)
        mine = [self._shard(self._parameters[number], *self._ranges[number]) for number in numbers]
        device = plain_data(self._parameters[numbers[0]]).device
        flat = torch.zeros(size, dtype=mine[0].dtype, device=device)
        torch.cat([shard.to(device) for shard in mine], out=flat[: sum(len(shard) for shard in mine)])
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
        """Copy the flat ranges into the master copies."""
        self._state.write_flat_ranges(list(zip(self._parameters, self.current(), strict=True)))

    def as_saved(self, number: int, average: Tensor) -> Tensor:
        """Return the average as a tensor of full shape of which this rank has its flat range."""
        parameter = self._parameters[number]
        start, numel = self._ranges[number]
        shape = full_shape(parameter)
        is_sharded = any(ranges[number] != self._ranges[number] for ranges in self._ranges_by_rank)
        if numel == full_numel(parameter) and not is_sharded:
            return average.view(shape)
        return FlatShard(shape, average.dtype, start, numel, partial(identity, average))

    def read(self, number: int, stored: Tensor, average: Tensor) -> None:
        """Read this rank's flat range of `stored` into the `average`."""
        read_flat_range(stored, self._ranges[number][0], average)

    def has_master(self, number: int) -> bool:
        """Whether a checkpoint holds the fp32 master copy of a parameter."""
        return self._state.has_master(self._parameters[number])
