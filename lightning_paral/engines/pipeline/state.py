"""The state of a module that is divided among the stages of a pipeline."""

from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_paral.checkpoint.dtensor_chunks import dtensor_like
from lightning_paral.checkpoint.ended_optimizers import EndedOptimizers
from lightning_paral.checkpoint.lazy_tensor import read_into
from lightning_paral.checkpoint.optimizer_state import State, load_state, param_names, place_state, to_fqn_keys
from lightning_paral.checkpoint.sharded_state import WeightShards
from lightning_paral.checkpoint.tensor_state import TensorState
from lightning_paral.engines.pipeline.elsewhere import is_elsewhere
from lightning_paral.engines.pipeline.run import PipelineRun
from lightning_paral.model.clipping import local_part
from lightning_paral.model.host_memory_check import host_memory_shortage


class PipelineState(TensorState):
    """The state of the module of `run`; implements `ShardedState`. Parameters of other stages are empty `FlatShard`s.

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

    @property
    def is_sharded(self) -> bool:
        """Whether this rank lacks parameters, which other stages have."""
        return super().is_sharded or any(map(is_elsewhere, self.module.parameters()))

    def write_shard(self, parameter: Parameter, stored: Tensor) -> bool:
        """Leave out the parameters of other stages, and leave the others to `Module.load_state_dict`."""
        return is_elsewhere(parameter) or super().write_shard(parameter, stored)

    def load_optimizer_state(self, optimizer: Optimizer, saved: State) -> None:
        """Load a saved state, of which only this stage's part is read."""
        names = param_names(optimizer, self.module)
        state = {**saved, **to_fqn_keys(saved, names)}
        own = {name for name, parameter in self.module.named_parameters() if not is_elsewhere(parameter)}
        state["state"] = {name: value for name, value in state["state"].items() if name in own}
        load_state(optimizer, names, state)
        place_state(optimizer, self.device)

    def full_parameter(self, parameter: Parameter) -> Tensor:
        """Return a copy of `parameter`. *Collective* over the pipeline."""
        value = self._run.parameters.full(parameter, None if is_elsewhere(parameter) else parameter)
        assert value is not None
        return value

    def full_gradient(self, parameter: Parameter) -> Tensor | None:
        """Return a copy of the gradient of `parameter`, or `None`. *Collective* over the pipeline."""
        return self._run.parameters.full(parameter, parameter.grad)

    def full_optimizer_state(self, parameter: Parameter, key: str) -> Tensor:
        """Return a copy of the optimizer state `key` of `parameter`. *Collective* over the pipeline.

        Raises:
            ValueError: there is no such state.
        """
        found = (optimizer.state.get(parameter, {}).get(key) for optimizer in self.optimizers)
        value = next((each for each in found if each is not None), None)
        full = self._run.parameters.full(parameter, None if value is None else torch.as_tensor(value))
        return full if full is not None else super().full_optimizer_state(parameter, key)

    def gradient_norm(self, optimizer: Any = None) -> Tensor:
        """Return the 2-norm of all gradients, or of those of one optimizer. *Collective* over the pipeline."""
        groups = [{"params": self.module.parameters()}] if optimizer is None else optimizer.param_groups
        return self._run.gradients.norm_of(parameter for group in groups for parameter in group["params"])

    def weight_shards(self) -> WeightShards:
        """Return the parameters of this stage. No collective."""
        return StageShards(self._run)

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


class StageShards:
    """This rank's parameters of its stage, for averages of weights; implements `WeightShards`. Others are empty."""

    def __init__(self, run: PipelineRun) -> None:
        self._run = run

    def prepare(self) -> None:
        """Do nothing, because user code writes directly to the weights."""

    def current(self) -> list[Tensor]:
        """Return the parameters of this stage, or their shards, and empty tensors for those of other stages."""
        return [
            torch.empty(0, dtype=parameter.dtype, device=self._run.device)
            if is_elsewhere(parameter)
            else local_part(parameter.detach())
            for parameter in self._run.module.parameters()
        ]

    def publish(self, *, borrowed: bool) -> None:
        """Do nothing, because the module computes with these tensors."""

    def keep(self) -> None:
        """Do nothing: there are no other copies of the weights."""

    def as_saved(self, number: int, average: Tensor) -> Tensor:
        """Return the average, placed like the parameter, or the empty shard of a parameter of another stage."""
        parameter: Any = self._parameter(number)
        if isinstance(parameter, DTensor):
            return dtensor_like(average, parameter)
        return parameter.detach() if is_elsewhere(parameter) else average

    def read(self, number: int, stored: Tensor, average: Tensor) -> None:
        """Copy this rank's part of `stored` into `average`, unless the parameter is on another stage."""
        if not is_elsewhere(self._parameter(number)):
            read_into(stored, self.as_saved(number, average))

    def has_master(self, number: int) -> bool:
        """Return `False`: the parameters are themselves the master weights."""
        return False

    def _parameter(self, number: int) -> Parameter:
        return list(self._run.module.parameters())[number]
