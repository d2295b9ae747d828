"""The interface between the state of an engine and the code that saves, loads, reads, averages and restores it.

Each engine implements `ShardedState` once. Checkpoints, the readers for hooks, averages of weights, and teardown access
an engine only through it. Strategies that do not shard use `checkpoint.tensor_state.TensorState`.
"""

from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_paral.checkpoint.ended_optimizers import EndedOptimizers


class WeightShards(Protocol):
    """This rank's shards of a module's parameters, for averages of weights, in the order of `module.parameters()`.

    An average has the shape of its shard, and may be on a different device.
    """

    def prepare(self) -> None:
        """Copy values that user code wrote to parameters into the shards. Call this before changing shards.

        Not a collective.
        """

    def current(self) -> list[Tensor]:
        """Return the shards as plain tensors that share memory with them. Not a collective."""

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

    def read(self, number: int, stored: Tensor, average: Tensor) -> None:
        """Copy this rank's shard of `stored`, which has the full shape, into the average of parameter `number`."""

    def has_master(self, number: int) -> bool:
        """Return whether a checkpoint contains the master weight of parameter `number` instead of the shard."""


class ShardedState(Protocol):
    """Weights, gradients and optimizer states of one module, of which this rank may have only shards.

    It is valid from `setup` to `teardown` of one run. "Full" tensors have the shape that they would have without
    sharding. *Collective* methods must be called on all ranks of the world, in the same order.
    """

    @property
    def is_sharded(self) -> bool:
        """Whether parameters are sharded or on the meta device, so that this rank does not have all their values."""

    def full_shape(self, tensor: Tensor) -> tuple[int, ...]:
        """Return the full shape of a parameter or buffer of the module, unsharded or not. Not a collective."""

    # Shards of weights

    def collect_writes(self) -> None:
        """Copy values that user code wrote to parameters into the shards. Call this before saving weights.

        Not a collective.
        """

    def reading(self) -> AbstractContextManager[None]:
        """Return a context for reading many shards, which minimizes the reads of tensors that are offloaded to disk."""

    def read_shard(self, parameter: Parameter) -> Tensor:
        """Return this rank's shard of `parameter` for a checkpoint. Not a collective.

        Returns:
            Tensor: a tensor of the full shape: a plain tensor if this rank has all elements, otherwise a `DTensor` or
                `FlatShard`. Its dtype is fp32 if the parameter has an fp32 master weight, otherwise that of the
                parameter. It is on the device where the weight is stored, shares memory with it, and is valid until the
                next step.
        """

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

    def finish_writing(self) -> None:
        """Make the module compute with the values from `write_shard` and `Module.load_state_dict`. Not a collective."""

    # Optimizer states

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return `optimizer.state_dict()` with this rank's shards instead of full tensors. Not a collective.

        Tensors are like those of `read_shard`. Each group has the names of its parameters as `param_names`.

        Raises:
            CheckpointError: the state contains a value that cannot be saved in shards.
            ConfigurationError: the state was lost at the end of the run.
        """

    def load_optimizer_state(self, optimizer: Optimizer, saved: dict[str, Any]) -> None:
        """Load a saved state. Only this rank's shards are read. Not a collective.

        Raises:
            CheckpointError: the state does not match the optimizer.
        """

    # Full tensors, for hooks

    def full_parameter(self, parameter: Parameter) -> Tensor:
        """Return a full copy of `parameter` on its device, in fp32 if it has an fp32 master weight. *Collective*."""

    def full_gradient(self, parameter: Parameter) -> Tensor | None:
        """Return a full copy of the averaged gradient of `parameter`; `None` if it has no gradient. *Collective*."""

    def full_optimizer_state(self, parameter: Parameter, key: str) -> Tensor:
        """Return a full copy of the optimizer state `key`, such as `"exp_avg"`, of `parameter`. *Collective*.

        Raises:
            ValueError: there is no such state. Optimizers create their state in the first step.
        """

    def gradient_norm(self, optimizer: Any = None) -> Tensor:
        """Return the 2-norm of all averaged gradients as a 0-dimensional tensor, in fp32 or wider. *Collective*.

        Args:
            optimizer: an optimizer, or Lightning's wrapper of it, to use only its parameters; `None` uses all
                parameters of the module.
        """

    # Averages of weights, and the end of the run

    def weight_shards(self) -> WeightShards:
        """Return the shards from which averages of weights are computed. *Collective*."""

    def restore(self, ended: EndedOptimizers, *, failed: bool) -> None:
        """Restore the module to an ordinary one: full parameters on the host, and nothing that the engine added.

        *Collective*, unless `failed`. If parameters cannot be unsharded, because other ranks failed or the host does
        not have enough memory, they stay sharded, with a warning that gives the reason.

        Args:
            ended: receives the states of the optimizers, which may be used and saved after the run.
            failed: whether the run ended with an error, in which case other ranks may not take part in collectives.
        """
