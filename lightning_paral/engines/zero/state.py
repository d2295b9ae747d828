"""The state of a module under ZeRO: this rank's shards of weights and optimizer states, possibly on NVMe."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from lightning_paral.checkpoint.lazy_tensor import materialize, read_flat_range
from lightning_paral.checkpoint.optimizer_state import SavedOptimizer, State, hyper_parameters, to_int_keys
from lightning_paral.checkpoint.sharded_state import ShardedState, WeightShards
from lightning_paral.checkpoint.shards import FlatShard, identity
from lightning_paral.compat.deepspeed import engine as zero_engine
from lightning_paral.engines.zero.optimizer import Gradients, UsersOptimizer
from lightning_paral.engines.zero.partition import (
    full_shape,
    is_partitioned,
    is_stage3_parameter,
    local_flat_range,
    local_shard,
    read_partition,
    write_gathered,
    write_partition,
    write_partitions,
)
from lightning_paral.engines.zero.user_access import UserAccess, plain_data
from lightning_paral.errors import CheckpointError, ConfigurationError

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine


class FlatRange(NamedTuple):
    """This rank's flat range of a parameter, and its position in a partition."""

    start: int
    """The first element of the range in the flattened parameter."""
    numel: int
    position: int
    """The first element of the range in the flat tensor of the partition."""

    @property
    def in_flat(self) -> slice:
        """The slice of the partition's flat tensor that contains the range."""
        return slice(self.position, self.position + self.numel)


class Partition:
    """A flat fp32 tensor with this rank's flat ranges of several parameters, and its optimizer state.

    Args:
        optimizer: DeepSpeed's optimizer.
        stage: the stage of ZeRO.
        index: the index of the parameter group, or of the sub-group at stage 3.
        masters: the parameters, and their flat tensors.
        users: the user's optimizer.
    """

    def __init__(
        self, optimizer: Any, stage: int, index: int, masters: zero_engine.Masters, users: UsersOptimizer
    ) -> None:
        self._optimizer = optimizer
        self._users = users
        self._stage = stage
        self._index = index
        parameters, self.flat, weights = masters
        self.ranges = _ranges_at_stage_3(parameters) if stage == 3 else _ranges_within(weights, parameters)
        """The flat range of each parameter, by the `id` of the parameter."""
        self.has_own_memory = stage == 3 and (weights is None or weights.data_ptr() != self.flat.data_ptr())
        """Whether saves read the weights here and not from fp32 parameters, which may hold averages for a while."""
        self.place = index + 1 if stage == 3 and zero_engine.is_on_nvme(optimizer, index) else 0
        """0 for a partition in memory, a unique number for one on NVMe.

        Any read from NVMe loads the full partition, so tensors should be read place by place.
        """
        self.is_loaded = False
        """Whether a partition on NVMe is in memory now."""

    @property
    def state(self) -> dict[str, Any]:
        """The optimizer's state. Those of its tensors that are as long as `flat` are empty while `flat` is empty."""
        state: dict[str, Any] = self._users.flat_state[self.flat]
        return state

    @contextmanager
    def in_memory(self, *, write: bool) -> Iterator[tuple[Tensor, dict[str, Any]]]:
        """Keep the flat tensor and its state in memory inside this context. With `write`, write changes back."""
        if not self.place or self.is_loaded:
            yield self.flat, self.state
            return
        with self._users.flat():
            zero_engine.swap_in(self._optimizer, self._index)
        self.is_loaded = True
        try:
            yield self.flat, self.state
            with self._users.flat():
                zero_engine.swap_out(self._optimizer, self._index, write=write)
        finally:
            self.is_loaded = False

    @contextmanager
    def writing(self) -> Iterator[Tensor]:
        """Return the fp32 weights for writing inside this context.

        At stage 3, the weights that forward passes use are then updated from them. At stages 1 and 2, the caller does.
        """
        with self.in_memory(write=True) as (flat, _):
            yield flat.data
            if self._stage == 3:
                zero_engine.copy_masters_to_parameters(self._optimizer, self._index)


def _ranges_at_stage_3(parameters: list[Any]) -> dict[int, FlatRange]:
    padded = accumulate((parameter.ds_tensor.ds_numel for parameter in parameters), initial=0)
    return {
        id(each): FlatRange(*local_flat_range(each), start) for each, start in zip(parameters, padded, strict=False)
    }


def _ranges_within(own: Any, parameters: list[Any]) -> dict[int, FlatRange]:
    """Return the ranges of parameters that lie in `own`, this rank's part of the weights that they are views of."""
    ranges = {}
    for parameter in parameters:
        distance = (parameter.data_ptr() - own.data_ptr()) // own.element_size()
        start, position = max(0, -distance), max(0, distance)
        numel = min(parameter.numel() - start, own.numel() - position)
        ranges[id(parameter)] = FlatRange(start, numel, position) if numel > 0 else FlatRange(0, 0, 0)
    return ranges


_SCALARS = ("mu_product", "eta", "mu")
"""States of torch's NAdam and ASGD that are one number for each parameter, also for those without dimensions."""


def _joined(
    found: list[tuple[FlatRange, tuple[int, ...], dict[str, Any]]], like: Tensor, counts_in_int: bool
) -> dict[str, Any]:
    """Return the state of a flat tensor `like` from ranges in it, with the shapes and states of their parameters."""
    state: dict[str, Any] = {}
    taken = {float(values.get("step", 1 if values else 0)) for *_, values in found}
    if len(taken) > 1:
        raise CheckpointError(
            f"Parameters in the checkpoint have taken different numbers of steps, {min(taken):g} to {max(taken):g}, as "
            "if some were frozen before. Under ZeRO they share one count. Resume under paral_fsdp, or load only the "
            "weights, with a new optimizer."
        )
    for key in {key: None for *_, values in found for key in values}:
        of_key = [(own, shape, values[key]) for own, shape, values in found if key in values]
        if key == "step":
            step = taken.pop()
            state[key] = int(step) if counts_in_int else torch.tensor(step, dtype=torch.float32)
        elif key not in _SCALARS and all(isinstance(each, Tensor) and each.shape == shape for _, shape, each in of_key):
            dtype = like.dtype if of_key[0][-1].is_floating_point() else of_key[0][-1].dtype
            state[key] = torch.zeros_like(like, dtype=dtype, requires_grad=False)
            for own, _, value in of_key:
                read_flat_range(value, own.start, state[key][own.in_flat])
        else:
            first = of_key[0][-1]
            state[key] = materialize(first).clone() if isinstance(first, Tensor) else first
    return state


def _write_changed(master: Tensor, values: Tensor) -> None:
    """Copy `values` into fp32 weights, except where these, cast to the dtype of the parameter, equal them."""
    if values.data_ptr() == master.data_ptr():  # an fp32 parameter, which shares its memory with its master
        return
    values = values.to(master.device)
    master.copy_(torch.where(master.to(values.dtype) == values, master, values.to(master.dtype)))


class ZeroState(ShardedState):
    """The state of a module under ZeRO.

    A parameter is stored in one of three ways: as an fp32 master copy in the engine that trains it (if its dtype is not
    fp32, and always at stage 3), as a partition of stage 3, or as a plain tensor. Before `start_training` there is no
    engine: this is then the state of an evaluation, or of a module between runs.
    """

    gradients: Gradients | None = None
    """The gradients of the fit, after a successful setup."""
    access: UserAccess | None = None
    """Lets user code use parameters whose values are stored elsewhere."""
    _stage = 0
    """The stage of the engine that trains the module; 0 if there is none."""
    _users: UsersOptimizer | None = None
    _partitions: tuple[Partition, ...] = ()
    _kept: ExitStack | None = None
    """Inside `reading`, the partition on NVMe that is kept in memory."""

    def start_training(self, engine: "DeepSpeedEngine", users: UsersOptimizer) -> UserAccess:
        """Store weights and optimizer states in `engine`, and return what user code uses parameters through."""
        self._stage = engine.zero_optimization_stage()
        self._zero_optimizer: Any = engine.optimizer
        self._users = users
        self._parameters = dict(self.module.named_parameters())
        masters = enumerate(zero_engine.all_masters(engine.optimizer, self._stage))
        self._partitions = tuple(Partition(engine.optimizer, self._stage, *each, users) for each in masters)
        self._partition_by_id = {id_: partition for partition in self._partitions for id_ in partition.ranges}
        self._stored: list[tuple[Parameter, Tensor]] = []
        self.access = UserAccess(self.module, self.write_full_values, hides_gradients=True)
        return self.access

    def start_evaluation(self) -> None:
        """Begin to record what user code writes to a module that is partitioned at stage 3 but not trained."""
        self.access = UserAccess(self.module, write_partitions, hides_gradients=False)

    def _partition_of(self, parameter: Parameter) -> Partition | None:
        """Return the partition with `parameter` if the engine trains it, or did so when the run began; else `None`."""
        return self._partition_by_id.get(id(parameter)) if self._partitions else None

    @property
    def trained(self) -> dict[str, Parameter]:
        """The parameters that the engine trains, by name."""
        return {name: p for name, p in self._parameters.items() if self._partition_of(p) is not None}

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

    def read_shard(self, parameter: Parameter) -> Tensor:
        """Return this rank's shard of `parameter`: a flat range of the fp32 master copy if it has one."""
        partition = self._partition_of(parameter)
        if partition is None:
            return read_partition(parameter)
        if self._stage < 3 and not self.has_master(parameter):
            return parameter.detach()
        return self._flat_shard(partition, parameter, torch.float32, None)

    def has_master(self, parameter: Parameter) -> bool:
        """Return whether `read_shard` reads an fp32 master copy of `parameter`, not the weight of forward passes."""
        partition = self._partition_of(parameter)
        return partition is not None and (parameter.dtype != torch.float32 or partition.has_own_memory)

    def local_flat_range(self, parameter: Parameter) -> tuple[int, int] | None:
        """Return start and length of the range of flattened `parameter` that this rank updates, or stores if frozen.

        `None` for a frozen parameter that every rank has in full.
        """
        if is_stage3_parameter(parameter):
            return local_flat_range(parameter)
        partition = self._partition_of(parameter)
        if partition is None:
            return None
        flat_range = partition.ranges[id(parameter)]
        return flat_range.start, flat_range.numel

    def write_shard(self, parameter: Parameter, stored: Tensor) -> bool:
        """Copy this rank's shard of `stored` into `parameter`. `finish_writing` copies it into the master copy.

        Returns:
            bool: `False` for a parameter that every rank has in full: the caller passes it to
                `Module.load_state_dict`.
        """
        partition = self._partition_of(parameter)
        if partition is None:
            return write_partition(parameter, stored)
        self._stored.append((parameter, stored))
        if self._stage == 3:
            write_gathered(parameter, stored)
        return self._stage == 3

    def finish_writing(self) -> None:
        """Write the master copies, partition by partition, because each may be on NVMe.

        Loaded values do not count as writes of user code.
        """
        if self._partitions:
            stored, self._stored = self._stored, []
            for master, own, values in self._masters(stored):
                read_flat_range(values, own.start, master)
        if self.access is not None:
            self.access.mark_unwritten()

    def _masters(self, new: list[tuple[Parameter, Tensor]]) -> Iterator[tuple[Tensor, FlatRange, Tensor]]:
        """Yield this rank's flat range of each trained parameter in `new`, its fp32 weights to write, and the values.

        This is done partition by partition, because each may be on NVMe.
        """
        by_partition: dict[Partition, list[tuple[FlatRange, Tensor]]] = {}
        for parameter, values in new:
            partition = self._partition_of(parameter)
            if partition is not None:
                by_partition.setdefault(partition, []).append((partition.ranges[id(parameter)], values))
        for partition, written in by_partition.items():
            with partition.writing() as flat:
                for own, values in written:
                    yield flat[own.in_flat], own, values

    # Values that change during a run

    def write_full_values(self, written: list[tuple[Parameter, Tensor]]) -> None:
        """Copy this rank's shards of full values, which all ranks have, to where shards are stored. No collective."""
        for parameter, values in written:
            if self._partition_of(parameter) is None:
                write_partition(parameter, values)
            elif self._stage == 3:
                write_gathered(parameter, values)
        for master, own, values in self._masters(written):
            _write_changed(master, values.reshape(-1)[own.start : own.start + own.numel])

    def write_flat_ranges(self, ranges: list[tuple[Parameter, Tensor]]) -> None:
        """Copy new 1-dimensional values of this rank's flat ranges into the fp32 weights of trained parameters."""
        for master, _, values in self._masters(ranges):
            _write_changed(master, values)

    def gather_weights(self) -> None:
        """At stages 1 and 2, give every rank the weights that the others update, as a step does. *Collective*."""
        if self._stage in (1, 2):
            zero_engine.gather_weights(self._zero_optimizer)

    # Reads of many tensors, each from NVMe once

    def _keep(self, partition: Partition) -> None:
        """Inside `reading`, keep `partition` in memory until another is read from NVMe."""
        if self._kept is not None and partition.place and not partition.is_loaded:
            self._kept.close()
            self._kept.enter_context(partition.in_memory(write=False))

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Return a context for reading many tensors, in which each partition on NVMe is read once."""
        try:
            with ExitStack() as self._kept:
                yield
        finally:
            self._kept = None

    def _flat_shard(self, partition: Partition, parameter: Parameter, dtype: torch.dtype, key: str | None) -> FlatShard:
        """Return this rank's shard of the fp32 weight of `parameter`, or of its state `key`. It is read when needed."""
        own = partition.ranges[id(parameter)]

        def read() -> Tensor:
            self._keep(partition)
            with partition.in_memory(write=False) as (flat, state):
                values = (flat.detach() if key is None else state[key])[own.in_flat]
                return values.clone() if partition.place else values

        return FlatShard(full_shape(parameter), dtype, own.start, own.numel, read, partition.place)

    # Optimizer states

    def optimizer_state(self, optimizer: Optimizer) -> State:
        """Return the state of `optimizer`. Its tensors have the full shape, and this rank has a flat range of each."""
        if self._users is None:
            return super().optimizer_state(optimizer)
        names = [name for group_names in self._users.names for name in group_names]
        found = {name: self._state_of(self._parameters[name]) for name in names}
        groups = [
            hyper_parameters(group) | {"params": list(group_names)}
            for group, group_names in zip(self._users.groups, self._users.names, strict=True)
        ]
        state = {name: values for name, values in found.items() if values}
        return to_int_keys({"state": state, "param_groups": groups})

    def _state_of(self, parameter: Parameter) -> dict[str, Any]:
        """Return the optimizer's state of `parameter`, with `FlatShard`s; empty if it has none.

        Raises:
            CheckpointError: the state is not one value per element.
        """
        partition = self._partition_of(parameter)
        if partition is None:
            return {}
        found: dict[str, Any] = {}
        for key, value in partition.state.items():
            if isinstance(value, Tensor) and value.shape == partition.flat.shape and value.dim():
                found[key] = self._flat_shard(partition, parameter, value.dtype, key)
            elif isinstance(value, Tensor) and value.numel() > 1:
                raise CheckpointError(
                    f"The optimizer's state {key!r} has shape {tuple(value.shape)} for {partition.flat.numel()} "
                    "elements: it is not one value per element, and cannot be saved under ZeRO. Train with paral_ddp."
                )
            else:
                found[key] = torch.tensor(float(value)) if key == "step" else value
        return found

    def load_optimizer_state(self, optimizer: Optimizer, saved: State) -> None:
        """Load a saved state during a fit. This rank reads only its flat ranges.

        Raises:
            CheckpointError: it is the state of another optimizer, or its parameters took different numbers of steps.
        """
        if self._users is None:
            return
        checkpoint = SavedOptimizer(saved, self._users.names)
        for group, group_names in zip(self._users.groups, self._users.names, strict=True):
            group.update(checkpoint.hyper_parameters(group, group_names))
        counts_in_int = type(optimizer).__module__.startswith("deepspeed.ops")  # others count in a tensor
        for partition in self._partitions:
            parameters = [(name, p) for name, p in self._parameters.items() if id(p) in partition.ranges]
            found = [(partition.ranges[id(p)], full_shape(p), checkpoint.state.get(name, {})) for name, p in parameters]
            with partition.in_memory(write=True) as (flat, state):
                loaded = _joined(found, flat, counts_in_int)
                state.clear()
                state.update(loaded)

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
        if self._partition_of(parameter) is None:
            return super().state_shard(parameter, key)
        return self._state_of(parameter).get(key)

    def gradient_norm(self, optimizer: Any = None) -> Tensor:
        """Return the 2-norm of the averaged gradients: a scalar, fp32. *Collective*.

        Args:
            optimizer: ignored, because there is only one.

        Raises:
            ConfigurationError: it is called outside of a fit.
            GradientsNotReadyError: it is not called between the last backward pass of a step and the step itself.
        """
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
