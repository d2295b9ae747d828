"""The interface between an engine's state and the code that saves, loads, reads, averages and restores it.

Each engine implements `ShardedState` once. The checkpoint, the readers for hooks, the averages of weights and teardown
know an engine by it alone. Where no engine shards anything, `checkpoint.tensor_state.TensorState` is the state.
"""

from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_paral.checkpoint.state.ended_optimizers import EndedOptimizers


class WeightShards(Protocol):
    """This rank's shards of a module's parameters, for averages of weights, in the order of `module.parameters()`.

    An average has the shape of the shard that it averages, and may be on another device.
    """

    def prepare(self) -> None:
        """Bring what user code wrote to parameters into the shards. Called before shards are written. No collective."""

    def current(self) -> list[Tensor]:
        """Return the shards as plain tensors that share memory with them. No collective."""

    def publish(self, *, borrowed: bool) -> None:
        """Compute with the values that the shards have now. *Collective* over the world.

        Args:
            borrowed: whether the shards hold averages for an evaluation. Master copies and the weights that training
                continues with stay as they are then.
        """

    def keep(self) -> None:
        """Make the values that the shards have now the weights of the module, also in its master copies."""

    def as_saved(self, number: int, average: Tensor) -> Tensor:
        """Return the average of parameter `number` for a checkpoint, as `ShardedState.read_shard` returns a weight."""

    def read(self, number: int, stored: Tensor, average: Tensor) -> None:
        """Copy this rank's shard of `stored`, which has the full shape, into the `average` of parameter `number`."""

    def has_master(self, number: int) -> bool:
        """Whether a checkpoint holds the master copy of parameter `number`, and not the shard."""


class ShardedState(Protocol):
    """Weights, gradients and optimizer states of one module, of which this rank may hold shards only.

    It is valid from `setup` to `teardown` of one run. "Full" tensors have the shape that they have without sharding.
    *Collective* methods have to be called on all ranks of the world, in the same order.
    """

    @property
    def is_sharded(self) -> bool:
        """Whether this rank lacks values of parameters: it has shards of them, or they are on the meta device."""

    def full_shape(self, tensor: Tensor) -> tuple[int, ...]:
        """Return the full shape of a parameter or buffer of the module, in use or not. No collective."""

    # Shards of weights

    def collect_writes(self) -> None:
        """Bring what user code wrote to parameters into the shards. Called before weights are saved. No collective."""

    def reading(self) -> AbstractContextManager[None]:
        """Return a context for reading many shards: what is offloaded to disk is read as few times as possible."""

    def read_shard(self, parameter: Parameter) -> Tensor:
        """Return this rank's shard of `parameter` for a checkpoint. No collective.

        Returns:
            Tensor: of the full shape: a plain tensor where this rank has all of it, else a `DTensor` or a `FlatShard`.
                It is fp32 where the optimizer has an fp32 master copy, otherwise of the parameter's dtype; on the
                device where it is kept. It shares memory with the weight, and is valid until the next step.
        """

    def write_shard(self, parameter: Parameter, stored: Tensor) -> bool:
        """Copy this rank's shard of `stored` into `parameter` and into its master copy. No collective.

        The values may be in use only after `finish_writing`.

        Args:
            parameter: of the module.
            stored: of the full shape, any dtype, on the host. Only this rank's shard of a `LazyTensor` is read.

        Returns:
            bool: whether that was all; if `False`, the caller passes `stored` to `Module.load_state_dict` as well.
        """

    def finish_writing(self) -> None:
        """Compute with the weights as they were loaded by `write_shard` and `Module.load_state_dict`. No collective."""

    # Optimizer states

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return what `optimizer.state_dict()` does, with this rank's shards as the tensors. No collective.

        Tensors are as `read_shard` returns them; `param_names` in each group are the names of its parameters.

        Raises:
            CheckpointError: the optimizer keeps something that cannot be saved in shards.
            ConfigurationError: its state was lost at the end of the run.
        """

    def load_optimizer_state(self, optimizer: Optimizer, saved: dict[str, Any]) -> None:
        """Load a saved state, of which only this rank's shards are read. No collective.

        Raises:
            CheckpointError: it is the state of another optimizer.
        """

    # Full tensors, for hooks

    def full_parameter(self, parameter: Parameter) -> Tensor:
        """Return a full copy of `parameter`, fp32 where there is a master copy, on its device. *Collective*."""

    def full_gradient(self, parameter: Parameter) -> Tensor | None:
        """Return a full copy of the averaged gradient of `parameter`, `None` if it has none. *Collective*."""

    def full_optimizer_state(self, parameter: Parameter, key: str) -> Tensor:
        """Return a full copy of the optimizer's state `key` of `parameter`, such as `"exp_avg"`. *Collective*.

        Raises:
            ValueError: there is no such state yet; optimizers create it in their first step.
        """

    def gradient_norm(self, optimizer: Any = None) -> Tensor:
        """Return the 2-norm of all averaged gradients, 0-dimensional, fp32 or wider. *Collective*.

        Args:
            optimizer: whose parameters count; `None` for all parameters of the module. Lightning's wrapper will do.
        """

    # Averages of weights, and the end of the run

    def weight_shards(self) -> WeightShards:
        """Return the shards that averages of weights are made of. *Collective*."""

    def restore(self, ended: EndedOptimizers, *, failed: bool) -> None:
        """Return the module to the user: full parameters on the host, without anything that the engine added.

        *Collective*, unless `failed`. Where that cannot be done (other ranks failed, the host lacks memory) parameters
        stay sharded, with a warning that says why.

        Args:
            ended: takes over the states of the optimizers, which are used and saved after the run, too.
            failed: whether the run ended by an error, so that other ranks may not join in collectives.
        """
