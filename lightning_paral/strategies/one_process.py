"""Implement the collectives of a strategy that has one process."""

from typing import Any

import torch

from lightning_paral.distributed.mesh import ParallelDims
from lightning_paral.strategies.description import StrategyDescription


class OneProcess(StrategyDescription):
    """Mixin, placed before the Lightning base: the process is rank 0 of 1, whatever environment variables say."""

    @property
    def global_rank(self) -> int:
        """0, the rank of the only process."""
        return 0

    local_rank = node_rank = global_rank

    @property
    def world_size(self) -> int:
        """1, the number of processes."""
        return 1

    @property
    def dims(self) -> ParallelDims:
        """The arrangement of one rank; the replicas of a step are threads of this process."""
        return ParallelDims()

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Arguments of a `DistributedSampler` that draws all samples; Lightning's would count devices as processes."""
        return {"num_replicas": self.dims.data_size, "rank": self.dims.data_rank}

    def barrier(self, name: str | None = None) -> None:
        """Do nothing."""

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return `obj`."""
        return obj

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Return `tensor`."""
        return tensor

    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        """Return `tensor`."""
        return tensor

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:  # noqa: A002  Lightning's name
        """Return `decision`."""
        return decision
