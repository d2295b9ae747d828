"""The state of a module under ZeRO: DeepSpeed's partitions of weights and optimizer states."""

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from lightning_paral.checkpoint.lazy_tensor import read_flat_range
from lightning_paral.checkpoint.optimizer_state import State
from lightning_paral.checkpoint.sharded_state import ShardedState, WeightShards
from lightning_paral.checkpoint.shards import FlatShard, identity
from lightning_paral.engines.zero.gradients import Gradients
from lightning_paral.engines.zero.partition import (
    full_shape,
    is_partitioned,
    is_stage3_parameter,
    local_flat_range,
    local_shard,
    read_partition,
    write_partition,
    write_partitions,
)
from lightning_paral.engines.zero.shards import EngineShards
from lightning_paral.engines.zero.user_access import UserAccess, plain_data
from lightning_paral.errors import ConfigurationError


class ZeroState(ShardedState):
    """The state of a module under ZeRO.

    A parameter is stored in one of three ways: as an fp32 master copy in the engine that trains it (if its dtype is not
    fp32, and always at stage 3), as a partition of stage 3, or as a plain tensor. Before `start_training` there are no
    engines: this is then the state of an evaluation, or of a module between runs.
    """

    gradients: Gradients | None = None
    """The gradients of the fit, after a successful setup."""
    access: UserAccess | None = None
    """Lets user code use parameters whose values are stored elsewhere."""
    max_live = 10**9
    """How many elements of parameters may stay gathered for hooks."""
    _engine_shards: EngineShards | None = None

    def start_training(self, engine: EngineShards) -> UserAccess:
        """Store weights and optimizer states in `engine`, and return what user code uses parameters through."""
        self._engine_shards = engine
        self.access = UserAccess(self.module, self.write_full_values, hides_gradients=True, max_live=self.max_live)
        return self.access

    def start_evaluation(self) -> None:
        """Begin to record what user code writes to a module that is partitioned at stage 3 but not trained."""
        self.access = UserAccess(self.module, write_partitions, hides_gradients=False, max_live=self.max_live)

    def _engine_for_parameter(self, parameter: Parameter) -> EngineShards | None:
        """Return the engine if it trains `parameter`, or did so when the run began; else `None`."""
        engine = self._engine_shards
        return engine if engine is not None and engine.has(parameter) else None

    @property
    def is_sharded(self) -> bool:
        """Whether parameters are partitioned, DTensors, or on the meta device."""
        return super().is_sharded or any(is_stage3_parameter(parameter) for parameter in self.module.parameters())

    def full_shape(self, tensor: Tensor) -> tuple[int, ...]:
        """Return the full shape of a parameter or buffer, partitioned or not."""
        return full_shape(tensor)

    # Shards of weights

    def collect_writes(self) -> None:
        """Copy values that user code wrote to parameters to where DeepSpeed stores them. No collective."""
        if self.access is not None:
            self.access.collect()

    def reading(self) -> AbstractContextManager[None]:
        """Return a context for reading many tensors, in which each sub-group on NVMe is read once."""
        return nullcontext() if self._engine_shards is None else self._engine_shards.reading()

    def read_shard(self, parameter: Parameter) -> Tensor:
        """Return this rank's shard of `parameter`: a flat range of the fp32 master copy if it has one."""
        engine = self._engine_for_parameter(parameter)
        return read_partition(parameter) if engine is None else engine.read_shard(parameter)

    def write_shard(self, parameter: Parameter, stored: Tensor) -> bool:
        """Copy this rank's shard of `stored` into `parameter`. `finish_writing` copies it into the master copy.

        Returns:
            bool: `False` for a parameter that every rank has in full: the caller passes it to
                `Module.load_state_dict`.
        """
        engine = self._engine_for_parameter(parameter)
        return write_partition(parameter, stored) if engine is None else engine.write_shard(parameter, stored)

    def finish_writing(self) -> None:
        """Write the master copies. Loaded values do not count as writes of user code."""
        if self._engine_shards is not None:
            self._engine_shards.write_masters()
        if self.access is not None:
            self.access.mark_unwritten()

    # Values that change during a run

    def write_full_values(self, written: list[tuple[Parameter, Tensor]]) -> None:
        """Copy this rank's shards of full values, which all ranks have, to where shards are stored. No collective."""
        own = [pair for pair in written if self._engine_for_parameter(pair[0]) is not None]
        if self._engine_shards is not None and own:
            self._engine_shards.write_full_values(own)
        write_partitions([pair for pair in written if self._engine_for_parameter(pair[0]) is None])

    def write_flat_ranges(self, ranges: list[tuple[Parameter, Tensor]]) -> None:
        """Copy new 1-dimensional values of this rank's flat ranges into the fp32 weights of trained parameters."""
        if self._engine_shards is not None:
            self._engine_shards.write_flat_ranges([pair for pair in ranges if self._engine_shards.has(pair[0])])

    def gather_weights(self) -> None:
        """Give every rank the flat ranges that the other ranks update, at stages 1 and 2. *Collective*."""
        if self._engine_shards is not None:
            self._engine_shards.gather_weights()

    def local_flat_range(self, parameter: Parameter) -> tuple[int, int] | None:
        """Return start and length of the range of flattened `parameter` that this rank updates, or stores if frozen.

        `None` for a frozen parameter that every rank has in full.
        """
        if is_stage3_parameter(parameter):
            return local_flat_range(parameter)
        engine = self._engine_for_parameter(parameter)
        return None if engine is None else engine.local_flat_range(parameter)

    def has_master(self, parameter: Parameter) -> bool:
        """Return whether `read_shard` reads an fp32 master copy of `parameter`, not the weight of forward passes."""
        engine = self._engine_for_parameter(parameter)
        return engine is not None and engine.has_master(parameter)

    # Optimizer states

    def optimizer_state(self, optimizer: Optimizer) -> State:
        """Return the state of `optimizer`. Its tensors have the full shape, and this rank has a flat range of each."""
        if self._engine_shards is None:
            return super().optimizer_state(optimizer)
        return self._engine_shards.optimizer_state()

    def load_optimizer_state(self, optimizer: Optimizer, saved: State) -> None:
        """Load a saved state during a fit. This rank reads only its flat ranges."""
        if self._engine_shards is not None:
            self._engine_shards.load_optimizer_state(saved)

    # Full tensors

    def full_gradient(self, parameter: Parameter) -> Tensor | None:
        """Return the full averaged gradient of `parameter` in fp32; `None` if it is frozen. *Collective*.

        Raises:
            ConfigurationError: it is called outside of a fit.
            GradientsNotReadyError: it is not called between the last backward pass of a step and the step itself.
        """
        return self._fit_gradients().full(parameter)

    def state_shard(self, parameter: Parameter, key: str) -> Any:
        """Return this rank's flat range of an optimizer state; `None` if there is none. Not a collective."""
        engine = self._engine_for_parameter(parameter)
        return super().state_shard(parameter, key) if engine is None else engine.parameter_state(parameter).get(key)

    def gradient_norm(self, optimizer: Any = None) -> Tensor:
        """Return the 2-norm of the averaged gradients: a scalar, fp32. *Collective*.

        Raises:
            ConfigurationError: it is called outside of a fit.
            GradientsNotReadyError: it is not called between the last backward pass of a step and the step itself.
        """
        if optimizer is not None and getattr(optimizer, "optimizer", optimizer) not in self.optimizers:
            raise ConfigurationError(
                f"This {type(optimizer).__name__} is not the optimizer that configure_optimizers returned. Use "
                "self.optimizers()."
            )
        return self._fit_gradients().norm()

    def _fit_gradients(self) -> Gradients:
        if self.gradients is None:
            raise ConfigurationError("Gradients exist during trainer.fit only.")
        return self.gradients

    # Averages of weights

    def weight_shards(self) -> WeightShards:
        """Return this rank's flat ranges of the weights, for averages of them. *Collective*."""
        assert self.access is not None
        return ZeroWeightShards(self.module, self, self.access)


class ZeroWeightShards(WeightShards):
    """This rank's flat ranges of the parameters during a fit, for averages of weights.

    At stages 1 and 2 every rank computes with full weights, but averages only the ranges that it updates. The ranks
    all-gather the averages before an evaluation that uses them, and when the averages become the weights.

    Args:
        module: the module whose parameters are averaged.
        state: the state with the weights and master copies.
        access: what user code uses parameters through.
    """

    def __init__(self, module: Module, state: ZeroState, access: UserAccess) -> None:
        super().__init__(module)
        self._parameters: list[Any] = list(module.parameters())
        self._state = state
        self._access = access
        self._ranges = [state.local_flat_range(parameter) for parameter in self._parameters]

    def prepare(self) -> None:
        """Copy the values that user code wrote to parameters into DeepSpeed's own copies of them."""
        self._access.collect()

    def current(self) -> list[Tensor]:
        """Return this rank's flat ranges of the weights that forward passes use, as 1-dimensional tensors."""
        self._access.collect()
        return [self._shard(parameter, own) for parameter, own in zip(self._parameters, self._ranges, strict=True)]

    def _shard(self, parameter: Any, own: tuple[int, int] | None) -> Tensor:
        if is_stage3_parameter(parameter):
            return local_shard(parameter)
        flat = plain_data(parameter).view(-1)
        return flat if own is None else flat[own[0] : own[0] + own[1]]

    def publish(self, *, borrowed: bool) -> None:
        """Use the current values in forward passes: full parameters get the flat ranges of all ranks. *Collective*.

        Args:
            borrowed: whether the values are averages for an evaluation, after which the weights are restored.
        """
        self._state.gather_weights()
        # Small parameters of stage 3 stay unsharded, and are gathered again, as DeepSpeed does after a step.
        kept_full = [p for p in self._parameters if is_stage3_parameter(p) and not is_partitioned(p)]
        if kept_full:
            kept_full[0].partition(kept_full)
            kept_full[0].all_gather(kept_full)
        # User code may write to borrowed weights. These values must not reach the master copies.
        self._access.write_back = write_partitions if borrowed else self._state.write_full_values
        self._access.mark_unwritten()

    def keep(self) -> None:
        """Make the current values the weights of the module, also in its master copies."""
        self._state.write_flat_ranges(list(zip(self._parameters, self.current(), strict=True)))

    def as_saved(self, number: int, average: Tensor) -> Tensor:
        """Return the average of parameter `number` for a checkpoint: full, or as a `FlatShard` if it is sharded."""
        shape, own = full_shape(self._parameters[number]), self._ranges[number]
        if own is None:
            return average.view(shape)
        return FlatShard(shape, average.dtype, *own, partial(identity, average))

    def read(self, number: int, stored: Tensor, average: Tensor) -> None:
        """Copy this rank's flat range of `stored` into `average`."""
        own = self._ranges[number]
        read_flat_range(stored, 0 if own is None else own[0], average)

    def has_master(self, number: int) -> bool:
        """Return whether a checkpoint holds the fp32 master copy of parameter `number`."""
        return self._state.has_master(self._parameters[number])
