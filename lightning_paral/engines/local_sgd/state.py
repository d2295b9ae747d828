"""What of local SGD is saved, read by hooks, and averaged by callbacks."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.nn import Parameter

from lightning_paral.checkpoint.lazy_tensor import read_flat_range, read_into
from lightning_paral.checkpoint.sharded_state import ShardedState, WeightShards
from lightning_paral.checkpoint.shards import FlatShard, flat
from lightning_paral.distributed.exchange import RankGroup
from lightning_paral.engines.local_sgd.run import LocalSGDRun

KEY = "local_sgd"
"""Key of what `entries` returns, in the state of this package."""
_OF_ALL = ("last/", "momentum/")
"""What the names of tensors begin with that are the same on all islands."""


class IslandState(ShardedState):
    """The state of a module of which each island has values of its own.

    Weights are the mean over the islands. Gradients and optimizer states are those of this island.
    """

    run: LocalSGDRun
    _means: Mapping[Tensor, Tensor] = {}

    def collect_writes(self) -> None:
        """Compute the mean of the weights. *Collective* over the world, unless all islands have it."""
        self._means = self.run.means()

    def read_shard(self, parameter: Parameter) -> Tensor:
        """Return the mean of `parameter`; call `collect_writes` before. Not a collective."""
        return self._means.get(parameter, parameter.detach())

    def weight_shards(self) -> WeightShards:
        """Return the weights from which averages are computed."""
        weights = IslandWeights(self.module)
        weights.run = self.run
        return weights


class IslandWeights(WeightShards):
    """The weights of an island, for averages of weights: the mean of their averages is the average of their mean."""

    run: LocalSGDRun

    def publish(self, *, borrowed: bool) -> None:
        """If the weights are averages of this island, replace them by their mean. *Collective* over the world."""
        if borrowed:
            self.run.average(self.current())

    def keep(self) -> None:
        """Make the mean of the averages the weights for good. *Collective* over the world."""
        self.run.average(self.current())
        self.run.settle()

    def as_saved(self, number: int, average: Tensor) -> Tensor:
        """Return the mean of an average. *Collective* over the world."""
        mean = average.detach().clone()
        self.run.average([mean])
        return mean

    def read(self, number: int, stored: Tensor, average: Tensor) -> None:
        """Copy `stored` into the average of this island."""
        read_into(stored, average)


def entries(run: LocalSGDRun, ranks: RankGroup) -> dict[str, Any]:
    """Return what a checkpoint has besides the mean, so that the same islands resume exactly. *Collective*."""
    tensors, kinds, count = run.tensors(), dict[str, Any](), run.islands.replicate
    for found in ranks.gather({name: (tuple(each.shape), each.dtype) for name, each in tensors.items()}):
        kinds |= found  # an optimizer has no state of a parameter that the island has not used
    shards: dict[str, Tensor] = {}
    for name, (shape, dtype) in kinds.items():
        value = tensors.get(name, torch.zeros(shape, dtype=dtype))
        if name.startswith(_OF_ALL) and ranks.is_rank_0:
            shards[name] = _shard(value, 0, 1)
        elif not name.startswith(_OF_ALL) and run.is_first_rank:
            shards[name] = _shard(value, run.island, count)
    return {"islands": count, "since": run.since, "tensors": shards}


def _shard(value: Tensor, number: int, count: int) -> FlatShard:
    """Return `value` as part `number` of a tensor that has `count` of them."""
    numel = value.numel()
    return FlatShard((count, *value.shape), value.dtype, number * numel, numel, partial(flat, value))


def restore(run: LocalSGDRun, saved: Mapping[str, Any]) -> None:
    """Give a run, which holds the mean and the state of the optimizers of the first island, what `entries` returned."""
    count, now = saved["islands"], run.islands.replicate
    run.since = saved["since"] if count == now else 0
    for name, target in run.tensors().items():
        if name in saved["tensors"] and (count == now or name.startswith("momentum/")):
            stored, number = saved["tensors"][name], 0 if name.startswith(_OF_ALL) else run.island
            values = torch.empty(target.numel(), dtype=stored.dtype)
            read_flat_range(stored, number * values.numel(), values)
            target.detach().copy_(values.view(target.shape))
    if count != now:
        rank_zero_info(
            f"The checkpoint is of {count} islands, and this run has {now}: training goes on from the mean of the "
            "weights, with the optimizer state of the first island."
        )
