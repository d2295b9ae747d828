"""The state of a module whose parameters are plain tensors or DTensors, such as a replica or a module between runs."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from lightning_paral.checkpoint.ended_optimizers import EndedOptimizers, gather_full_tensor
from lightning_paral.checkpoint.lazy_tensor import read_into
from lightning_paral.checkpoint.optimizer_state import State, load_state, param_names, place_state, state_of
from lightning_paral.checkpoint.sharded_state import ShardedState, WeightShards
from lightning_paral.checkpoint.shards import FlatShard
from lightning_paral.model.full_tensors import full_copy, gradient_norm


class TensorState(ShardedState):
    """Implements `ShardedState` for parameters, gradients and optimizer states as torch itself stores them.

    Tensors that every rank has in full are read without a collective.

    Args:
        module: the module.
        optimizers: the optimizers of the module.
        device: the device of this rank, on which collectives run.
        ended: the optimizers of past runs.
    """

    def __init__(
        self, module: Module, optimizers: Sequence[Optimizer], device: torch.device, ended: EndedOptimizers
    ) -> None:
        self.module = module
        self.optimizers = optimizers
        self.device = device
        self._ended = ended

    @property
    def is_sharded(self) -> bool:
        """Whether parameters are DTensors or on the meta device."""
        return any(isinstance(parameter, DTensor) or parameter.is_meta for parameter in self.module.parameters())

    def full_shape(self, tensor: Tensor) -> tuple[int, ...]:
        """Return the shape of a parameter or buffer. The shape of a DTensor is the full shape."""
        return tuple(tensor.shape)

    # Shards of weights

    def collect_writes(self) -> None:
        """Do nothing, because user code writes directly to the weights."""

    def reading(self) -> AbstractContextManager[None]:
        """Return a context that does nothing, because all tensors are in memory."""
        return nullcontext()

    def read_shard(self, parameter: Parameter) -> Tensor:
        """Return the parameter itself, detached."""
        return parameter.detach()

    def write_shard(self, parameter: Parameter, stored: Tensor) -> bool:
        """Copy this rank's shard of `stored` into a DTensor; leave a plain tensor to `Module.load_state_dict`."""
        if isinstance(parameter, DTensor):
            read_into(stored, parameter.detach())
        return isinstance(parameter, DTensor)

    def finish_writing(self) -> None:
        """Do nothing, because loaded weights are used directly."""

    # Optimizer states

    def optimizer_state(self, optimizer: Optimizer) -> State:
        """Return the state of `optimizer` with the names of its parameters, without copying tensors."""
        return state_of(optimizer, self._ended.names(optimizer, self.module))

    def load_optimizer_state(self, optimizer: Optimizer, saved: State) -> None:
        """Load a saved state, and move it to the devices of the parameters."""
        load_state(optimizer, param_names(optimizer, self.module), saved)
        place_state(optimizer, self.device)

    # Full tensors

    def full_parameter(self, parameter: Parameter) -> Tensor:
        """Return a full copy of `parameter`. *Collective* if it is a DTensor."""
        return full_copy(parameter)

    def full_gradient(self, parameter: Parameter) -> Tensor | None:
        """Return a full copy of the gradient of `parameter`, or `None`. *Collective* if it is a DTensor."""
        return None if parameter.grad is None else full_copy(parameter.grad)

    def full_optimizer_state(self, parameter: Parameter, key: str) -> Tensor:
        """Return a full copy of the optimizer state `key` of `parameter`. *Collective* if it is sharded.

        Raises:
            ValueError: there is no such state.
        """
        for optimizer in self.optimizers:
            value = optimizer.state.get(parameter, {}).get(key)
            if isinstance(value, FlatShard):  # an earlier run sharded it
                return gather_full_tensor(value, self.device)
            if value is not None:
                return full_copy(torch.as_tensor(value))
        raise ValueError(
            f"The optimizer has no state {key!r} for this parameter. Optimizers create their state in the first step."
        )

    def gradient_norm(self, optimizer: Any = None) -> Tensor:
        """Return the 2-norm of all gradients, or of those of one optimizer. *Collective* if they are DTensors."""
        if optimizer is None:
            return gradient_norm(self.module.parameters())
        return gradient_norm(parameter for group in optimizer.param_groups for parameter in group["params"])

    # Averages of weights, and the end of the run

    def weight_shards(self) -> WeightShards:
        """Raise a `NotImplementedError`: without shards, Lightning's own callbacks keep full averages."""
        raise NotImplementedError(f"{type(self).__name__} has no shards to average.")

    def restore(self, ended: EndedOptimizers, *, failed: bool) -> None:
        """Do nothing, because the module already has ordinary parameters."""
