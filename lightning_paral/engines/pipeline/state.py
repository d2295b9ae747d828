"""The state of a module that is divided among the stages of a pipeline."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from lightning_paral.checkpoint.optimizer_state import EndedOptimizers
from lightning_paral.checkpoint.sharded_state import ShardedState
from lightning_paral.checkpoint.shards import FlatShard, flat, identity
from lightning_paral.distributed.exchange import gather_objects
from lightning_paral.engines.pipeline.run import PipelineRun
from lightning_paral.model.host_memory_check import host_memory_shortage


class PipelineState(ShardedState):
    """The state of the module of `run`. Parameters of other stages are empty `FlatShard`s.

    Args:
        run: the current run.
        optimizers: the optimizers of the fit; if the run is an evaluation, those of an earlier fit.
        ended: the optimizers of past runs.
        ranks_per_node: number of ranks that share the memory of a node.
    """

    def __init__(
        self,
        run: PipelineRun,
        optimizers: Sequence[Optimizer],
        ended: EndedOptimizers,
        ranks_per_node: int,
    ) -> None:
        super().__init__(run.module, optimizers, run.device, ended)
        self._run = run
        self._ranks_per_node = ranks_per_node

    def full(self, parameter: Parameter, shard: Tensor | None) -> Tensor | None:
        """Return a full copy of what the stage that has `parameter` has of it. *Collective* over the pipeline."""
        return self._run.parameters.full(parameter, None if isinstance(shard, FlatShard) else shard)

    def gradient_norm(self, optimizer: Any = None) -> Tensor:
        """Return the 2-norm of all gradients, or of those of one optimizer. *Collective* over the pipeline."""
        groups = [{"params": self.module.parameters()}] if optimizer is None else optimizer.param_groups
        return self._run.gradients.norm_of(parameter for group in groups for parameter in group["params"])

    def restore(self, ended: EndedOptimizers, *, failed: bool) -> None:
        """Restore the module: all its parameters, with the values of all stages, on CPU. *Collective* over the world.

        If some ranks failed, or if a node lacks memory, parameters of other stages stay empty, with a warning.

        Args:
            ended: takes over the states of the optimizers of a fit.
            failed: whether an exception ended a run with several ranks.
        """
        run = self._run
        run.stop()
        obstacle: str | None
        if failed:
            obstacle = "the run failed, and the stages may not be at the same step"
        else:
            obstacle = host_memory_shortage(run.division.num_bytes, self._ranks_per_node)
        if obstacle is not None:
            rank_zero_warn(f"{type(run.module).__name__} stays divided among the stages: {obstacle}.")
        if obstacle is None:
            run.share_buffers()
        originals = run.parameters.restore(obstacle)
        if not failed:
            run.destroy_groups()
        if obstacle is None:
            if run.is_fit:
                for optimizer in self.optimizers:
                    ended.keep(optimizer, run.module, None, originals)
            run.module.cpu()


class EndedPipelineState(ShardedState):
    """The state of a module between runs: its parameters are on all ranks, the optimizer states on their stages.

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

    def state_shard(self, parameter: Parameter, key: str) -> Any:
        """Return this rank's shard of an optimizer state, which is empty on other stages. *Collective*.

        Parameters outside of the units are on all stages. The first stage then has the shards.
        """
        value = super().state_shard(parameter, key)
        if not dist.is_initialized() or dist.get_world_size() != len(self._stages):
            return value
        tensor = None if value is None else torch.as_tensor(value)
        about: list[Any] = gather_objects(None if tensor is None else (tuple(tensor.shape), tensor.dtype), None)
        first = next((rank for rank, each in enumerate(about) if each is not None), None)
        if first is None:
            return None
        shape, dtype = about[first]
        if isinstance(tensor, FlatShard) and self._stages[dist.get_rank()] == self._stages[first]:
            return tensor
        local = flat(tensor) if tensor is not None and dist.get_rank() == first else torch.empty(0, dtype=dtype)
        return FlatShard(shape, dtype, 0, local.numel(), partial(identity, local))
