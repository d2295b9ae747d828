"""The state of a module after a run in a pipeline, when each rank keeps the optimizer states of its stage."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from lightning_paral.checkpoint.ended_optimizers import EndedOptimizers
from lightning_paral.checkpoint.shards import FlatShard
from lightning_paral.checkpoint.tensor_state import TensorState
from lightning_paral.distributed.exchange import gather_objects


class EndedPipelineState(TensorState):
    """Implements `ShardedState` for a module between runs, whose parameters are on all ranks.

    Args:
        module: the module.
        optimizers: the optimizers of the last fit.
        device: the device of this rank, on which collectives run.
        ended: the optimizers of past runs.
        stages: the pipeline stage of each rank.
    """

    def __init__(
        self,
        module: Module,
        optimizers: Sequence[Optimizer],
        device: torch.device,
        ended: EndedOptimizers,
        stages: list[int],
    ) -> None:
        super().__init__(module, optimizers, device, ended)
        self._stages = stages

    def full_optimizer_state(self, parameter: Parameter, key: str) -> Tensor:
        """Return a full copy of the optimizer state `key` of `parameter`, on the host. *Collective* over the world.

        Raises:
            ValueError: there is no such state. Raised on all ranks.
        """
        found = (optimizer.state.get(parameter, {}).get(key) for optimizer in self.optimizers)
        value = next((each for each in found if each is not None), None)
        if not dist.is_initialized() or dist.get_world_size() != len(self._stages):
            return super().full_optimizer_state(parameter, key)
        tensor = None if value is None else torch.as_tensor(value)
        about: list[Any] = gather_objects(None if tensor is None else (tuple(tensor.shape), tensor.dtype), None)
        holders = [rank for rank, each in enumerate(about) if each is not None]
        if not holders:
            return super().full_optimizer_state(parameter, key)
        shape, dtype = about[holders[0]]
        full, rank = torch.zeros(shape, dtype=dtype, device=self.device), dist.get_rank()
        if isinstance(tensor, FlatShard):
            # Parameters outside of the units are on all stages, each of which has all shards.
            if self._stages[rank] == self._stages[holders[0]]:
                _write(tensor, full)
        elif tensor is not None and rank == holders[0]:
            full.copy_(tensor)
        if full.numel():
            dist.all_reduce(full)  # for each element, all ranks but one have zero
        return full.cpu()


def _write(shard: FlatShard, full: Tensor) -> None:
    values = shard.read().to(full.device)
    if shard.local_chunk is None:
        full.view(-1)[shard.start : shard.start + shard.local_numel] = values
    elif shard.local_numel:
        full[shard.local_chunk.index] = values.view(shard.local_chunk.sizes)
