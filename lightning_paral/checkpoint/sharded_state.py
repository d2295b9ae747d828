"""The interface between the state of an engine and the code that saves, loads, reads, averages and restores it.

`ShardedState` is the state of plain tensors and DTensors; an engine that stores something else overrides what differs.
Checkpoints, the readers for hooks, averages of weights, and teardown access an engine only through it.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from lightning_paral.checkpoint.layout import dtensor_like
from lightning_paral.checkpoint.lazy_tensor import read_into
from lightning_paral.checkpoint.optimizer_state import EndedOptimizers, State, load_state, param_names, state_of
from lightning_paral.checkpoint.shards import FlatShard, is_sharded
from lightning_paral.model.gradients import full_copy, gradient_norm


class WeightShards:
    """This rank's shards of a module's parameters, for averages of weights, in the order of `module.parameters()`.

    An average has the shape of its shard, and may be on a different device. A `FlatShard` is the parameter of another
    pipeline stage, whose shard is empty.

    Args:
        module: the module, whose parameters are plain tensors, DTensors or `FlatShard`.
    """

    def __init__(self, module: Module) -> None:
        self.module = module

    def prepare(self) -> None:
        """Copy values that user code wrote to parameters into the shards. Call this before changing shards.

        Not a collective.
        """

    @torch.no_grad()
    def current(self) -> list[Tensor]:
        """Return the shards as plain tensors that share memory with them. Not a collective."""
        return [_local(parameter) for parameter in self.module.parameters()]

    def publish(self, *, borrowed: bool) -> None:
        """Make the module compute with the current values of the shards. *Collective* over the world.

        Args:
            borrowed: whether the values are averages that are used only for an evaluation. Master weights, and the
                weights with which training continues, are then unchanged.
        """

    def keep(self) -> None:
        """Make the current values of the shards the weights of the module, also in the master weights."""

    def as_saved(self, number: int, average: Tensor) -> Tensor:
        """Return the average of parameter `number` for a checkpoint, as `ShardedState.read_shard` returns a weight."""
        parameter = list(self.module.parameters())[number]
        if isinstance(parameter, DTensor):
            return dtensor_like(average, parameter)
        return parameter.detach() if isinstance(parameter, FlatShard) else average

    def read(self, number: int, stored: Tensor, average: Tensor) -> None:
        """Copy this rank's shard of `stored`, which has the full shape, into the average of parameter `number`."""
        target = self.as_saved(number, average)
        if not isinstance(target, FlatShard):
            read_into(stored, target)

    def has_master(self, number: int) -> bool:
        """Return whether a checkpoint contains the master weight of parameter `number` instead of the shard."""
        return False


def _local(parameter: Parameter) -> Tensor:
    if isinstance(parameter, FlatShard):
        return torch.empty(0, dtype=parameter.dtype, device=parameter.device)
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter.detach()


class ShardedState:
    """Weights, gradients and optimizer states of one module, of which this rank may have only shards.

    It is valid from `setup` to `teardown` of one run, or between runs. "Full" tensors have the shape that they would
    have without sharding. *Collective* methods must be called on all ranks of the world, in the same order. Tensors
    that every rank has in full are read without a collective.

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
        """Whether parameters are sharded or on the meta device, so that this rank does not have all their values."""
        return any(is_sharded(parameter) or parameter.is_meta for parameter in self.module.parameters())

    def full_shape(self, tensor: Tensor) -> tuple[int, ...]:
        """Return the full shape of a parameter or buffer of the module, unsharded or not. Not a collective."""
        return tuple(tensor.shape)

    # Shards of weights

    def collect_writes(self) -> None:
        """Copy values that user code wrote to parameters into the shards. Call this before saving weights.

        Not a collective.
        """

    def reading(self) -> AbstractContextManager[None]:
        """Return a context for reading many shards, which minimizes the reads of tensors that are offloaded to disk."""
        return nullcontext()

    def read_shard(self, parameter: Parameter) -> Tensor:
        """Return this rank's shard of `parameter` for a checkpoint. Not a collective.

        Returns:
            Tensor: a tensor of the full shape: a plain tensor if this rank has all elements, otherwise a `DTensor` or
                `FlatShard`. Its dtype is fp32 if the parameter has an fp32 master weight, otherwise that of the
                parameter. It is on the device where the weight is stored, shares memory with it, and is valid until the
                next step.
        """
        return parameter.detach()

    def write_shard(self, parameter: Parameter, stored: Tensor) -> bool:
        """Copy this rank's shard of `stored` into `parameter` and its master weight. Not a collective.

        Call `finish_writing` before using the module.

        Args:
            parameter: a parameter of the module.
            stored: a tensor of the full shape on the host, of any dtype. Only this rank's shard of a `LazyTensor` is
                read.

        Returns:
            bool: whether `stored` was written completely. If `False`, the caller must also pass `stored` to
                `Module.load_state_dict`.
        """
        if isinstance(parameter, DTensor):
            read_into(stored, parameter.detach())
        return is_sharded(parameter)  # a `FlatShard` is the parameter of another stage

    def finish_writing(self) -> None:
        """Make the module compute with the values from `write_shard` and `Module.load_state_dict`. Not a collective."""

    # Optimizer states

    def optimizer_state(self, optimizer: Optimizer) -> State:
        """Return `optimizer.state_dict()` with this rank's shards instead of full tensors. Not a collective.

        Tensors are like those of `read_shard`. Each group has the names of its parameters as `param_names`.

        Raises:
            CheckpointError: the state contains a value that cannot be saved in shards.
            ConfigurationError: the state was lost at the end of the run.
        """
        return state_of(optimizer, self._ended.names(optimizer, self.module))

    def load_optimizer_state(self, optimizer: Optimizer, saved: State) -> None:
        """Load a saved state. Only this rank's shards are read. Not a collective.

        Raises:
            CheckpointError: the state does not match the optimizer.
        """
        load_state(optimizer, param_names(optimizer, self.module), saved)

    # Full tensors, for hooks

    def full(self, parameter: Parameter, shard: Tensor | None) -> Tensor | None:
        """Return a full copy of a weight, gradient or optimizer state of `parameter`. *Collective*.

        Args:
            parameter: a parameter of the module.
            shard: this rank's shard; `None` if there is none.

        Returns:
            Tensor | None: the copy, on the device of `parameter` or of a plain tensor; `None` if there is no shard.
        """
        if isinstance(shard, FlatShard):
            return _gather(shard, self.device).to(parameter.device)
        return None if shard is None else full_copy(shard)

    def full_parameter(self, parameter: Parameter) -> Tensor:
        """Return a full copy of `parameter` on its device, in fp32 if it has an fp32 master weight. *Collective*."""
        self.collect_writes()
        value = self.full(parameter, self.read_shard(parameter))
        assert value is not None
        return value

    def full_gradient(self, parameter: Parameter) -> Tensor | None:
        """Return a full copy of the averaged gradient of `parameter`; `None` if it has no gradient. *Collective*."""
        return self.full(parameter, parameter.grad)

    def full_optimizer_state(self, parameter: Parameter, key: str) -> Tensor:
        """Return a full copy of the optimizer state `key`, such as `"exp_avg"`, of `parameter`. *Collective*.

        Raises:
            ValueError: there is no such state. Optimizers create their state in the first step.
        """
        value = self.state_shard(parameter, key)
        full = self.full(parameter, None if value is None else torch.as_tensor(value))
        if full is None:
            raise ValueError(
                f"The optimizer has no state {key!r} for this parameter. Optimizers create their state in the first "
                "step."
            )
        return full

    def state_shard(self, parameter: Parameter, key: str) -> Any:
        """Return this rank's shard of an optimizer state; `None` if this rank has none. Not a collective."""
        found = (optimizer.state.get(parameter, {}).get(key) for optimizer in self.optimizers)
        return next((each for each in found if each is not None), None)

    def gradient_norm(self, optimizer: Any = None) -> Tensor:
        """Return the 2-norm of all averaged gradients as a 0-dimensional tensor, in fp32 or wider. *Collective*.

        Args:
            optimizer: an optimizer, or Lightning's wrapper of it, to use only its parameters; `None` uses all
                parameters of the module.
        """
        if optimizer is None:
            return gradient_norm(self.module.parameters())
        return gradient_norm(parameter for group in optimizer.param_groups for parameter in group["params"])

    # Averages of weights, and the end of the run

    def weight_shards(self) -> WeightShards:
        """Return the shards from which averages of weights are computed. *Collective*."""
        return WeightShards(self.module)

    def restore(self, ended: EndedOptimizers, *, failed: bool) -> None:
        """Restore the module to an ordinary one: full parameters on the host, and nothing that the engine added.

        *Collective*, unless `failed`. If parameters cannot be unsharded, because other ranks failed or the host does
        not have enough memory, they stay sharded, with a warning that gives the reason.

        Args:
            ended: receives the states of the optimizers, which may be used and saved after the run.
            failed: whether the run ended with an error, in which case other ranks may not take part in collectives.
        """


@torch.no_grad()
def _gather(shard: FlatShard, device: torch.device) -> Tensor:
    """Return the full tensor of which each rank has a shard, on `device`. *Collective* over the world."""
    full = torch.zeros(shard.shape, dtype=shard.dtype, device=device)
    local, position = shard.read().to(device), 0
    for chunk in shard.chunks:
        full[chunk.index] = local[position : position + chunk.numel].view(chunk.sizes)
        position += chunk.numel
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(full)  # for each element, all ranks but one have zero
    return full
