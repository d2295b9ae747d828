"""What a rank holds of the weights under ZeRO, for averages of them: runs of flattened parameters.

At stages 1 and 2 every rank computes with whole weights. It averages the runs that it updates, and the ranks exchange
these averages when they are evaluated or become the weights.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module

from lightning_paral.checkpoint.lazy_tensor import read_flat_range
from lightning_paral.checkpoint.shards import FlatShard, identity
from lightning_paral.checkpoint.state.weights import true_shape
from lightning_paral.engines.zero.config.options import ZeROOptions
from lightning_paral.engines.zero.parameters.masterless import fill_all
from lightning_paral.engines.zero.parameters.partition import is_partitioned
from lightning_paral.engines.zero.parameters.watched import plain_data
from lightning_paral.engines.zero.parameters.writes import Writes
from lightning_paral.engines.zero.state.checkpoint_state import ZeroCheckpointState
from lightning_paral.engines.zero.state.joint import JointCheckpointState

_GATHERED_NUMEL = 2**24
"""Elements gathered at a time, about."""


def averaging_obstacle(options: ZeROOptions) -> str | None:
    """Return why weights cannot be averaged with `options`, and what to do; `None` if they can."""
    if "offload_parameters" in options.on_nvme:
        return (
            "with parameters on NVMe, every average would read all of them. Keep them on the host, by "
            'offload_parameters="cpu", or leave out the callback.'
        )
    zero = options.users_config.get("zero_optimization", {})
    copies = [key for key in ("zero_hpz_partition_size", "mics_shard_size") if zero.get(key, 0) > 1]
    if copies:
        return (
            f"{copies[0]}={zero[copies[0]]} lets DeepSpeed gather weights from elsewhere than where they are updated. "
            "Leave the option out, or the callback."
        )
    return None


class WeightRuns:
    """The parameters of `module` in a fit under ZeRO: `WeightShards` of averages. *Collective* over the world."""

    def __init__(self, module: Module, holdings: ZeroCheckpointState | JointCheckpointState, writes: Writes) -> None:
        self._parameters: list[Any] = list(module.parameters())
        self._holdings = holdings
        self._writes = writes
        self._runs = [holdings.run_of(parameter) for parameter in self._parameters]
        self._runs_of_ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(self._runs_of_ranks, self._runs)

    def prepare(self) -> None:
        """Take over what users' code wrote to parameters."""
        self._writes.settle()

    def current(self) -> list[Tensor]:
        """Return this rank's runs of the weights that are computed with, 1-dimensional."""
        self._writes.settle_gathered()
        return [self._shard(parameter, *run) for parameter, run in zip(self._parameters, self._runs, strict=True)]

    def _shard(self, parameter: Any, start: int, numel: int) -> Tensor:
        if hasattr(parameter, "ds_id"):
            partition: Tensor = parameter.ds_tensor.data[:numel]
            return partition
        return plain_data(parameter).view(-1)[start : start + numel]

    def publish(self, *, borrowed: bool) -> None:
        """Let the module compute with the current values; whole parameters get the runs of all ranks. *Collective*."""
        whole = [number for number, each in enumerate(self._parameters) if not is_partitioned(each)]
        for bucket in self._buckets(whole):
            self._gather(bucket)
        # What an evaluation writes to weights is dropped after it with the averages, and must not reach the masters.
        self._writes.adopt_by(fill_all if borrowed else self._holdings.adopt)
        self._writes.accept()

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
                numel += _numel(self._parameters[number])
                if numel >= _GATHERED_NUMEL:
                    yield bucket
                    bucket, numel = [], 0
            if bucket:
                yield bucket

    def _gather(self, numbers: list[int]) -> None:
        """Give whole parameters, of one dtype, the runs of all ranks."""
        size = max(sum(runs[number][1] for number in numbers) for runs in self._runs_of_ranks)
        mine = [self._shard(self._parameters[number], *self._runs[number]) for number in numbers]
        device = plain_data(self._parameters[numbers[0]]).device
        flat = torch.zeros(size, dtype=mine[0].dtype, device=device)
        torch.cat([shard.to(device) for shard in mine], out=flat[: sum(len(shard) for shard in mine)])
        gathered = [torch.empty_like(flat) for _ in self._runs_of_ranks]
        dist.all_gather(gathered, flat)
        for values, runs in zip(gathered, self._runs_of_ranks, strict=True):
            position = 0
            for number in numbers:
                start, numel = runs[number]
                whole = plain_data(self._parameters[number]).view(-1)
                whole[start : start + numel].copy_(values[position : position + numel])
                position += numel

    def keep(self) -> None:
        """Give the runs to the master copies."""
        runs = zip(self._parameters, self.current(), strict=True)
        self._holdings.adopt_runs([(parameter, shard) for parameter, shard in runs])

    def as_saved(self, number: int, average: Tensor) -> Tensor:
        """Return the average as a tensor of true shape of which this rank has its run."""
        parameter = self._parameters[number]
        start, numel = self._runs[number]
        shape = true_shape(parameter)
        if numel == _numel(parameter) and not self._module_is_sharded(number):
            return average.view(shape)
        return FlatShard(shape, average.dtype, start, numel, partial(identity, average))

    def _module_is_sharded(self, number: int) -> bool:
        return any(runs[number] != self._runs[number] for runs in self._runs_of_ranks)

    def read(self, number: int, stored: Tensor, average: Tensor) -> None:
        """Fill an average with its run of `stored`."""
        read_flat_range(stored, self._runs[number][0], average)

    def has_master(self, number: int) -> bool:
        """Whether a checkpoint holds the fp32 master copy of a parameter."""
        return self._holdings.saves_master_of(self._parameters[number])


def _numel(parameter: Any) -> int:
    return int(getattr(parameter, "ds_numel", parameter.numel()))
