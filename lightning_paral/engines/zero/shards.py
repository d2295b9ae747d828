"""This rank's shards of the fp32 weights and the optimizer state that DeepSpeed's engine keeps, possibly on NVMe."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from lightning_paral.checkpoint.lazy_tensor import materialize, read_flat_range
from lightning_paral.checkpoint.optimizer_state import SavedOptimizer, State, hyper_parameters, to_int_keys
from lightning_paral.checkpoint.shards import FlatShard
from lightning_paral.compat.deepspeed import optimizer as zero_optimizer
from lightning_paral.engines.zero.optimizer import UsersOptimizer
from lightning_paral.engines.zero.partition import full_shape, local_flat_range, write_gathered
from lightning_paral.errors import CheckpointError

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine


@dataclass(frozen=True)
class FlatRange:
    """This rank's flat range of a parameter, and its position in a partition."""

    shape: tuple[int, ...]
    """The full shape of the parameter."""
    start: int
    """The first element of the range in the flattened parameter."""
    numel: int
    position: int
    """The first element of the range in the flat tensor of the partition."""

    @property
    def slice(self) -> slice:
        """The slice of the partition's flat tensor that contains the range."""
        return slice(self.position, self.position + self.numel)


class Partition:
    """A flat fp32 tensor with this rank's flat ranges of several parameters, and its optimizer state.

    Args:
        optimizer: DeepSpeed's optimizer.
        stage: the stage of ZeRO.
        index: the index of the parameter group, or of the sub-group at stage 3.
        parameters: the parameters.
        users: the user's optimizer.
    """

    def __init__(
        self, optimizer: Any, stage: int, index: int, parameters: Iterable[Any], users: UsersOptimizer
    ) -> None:
        self._optimizer = optimizer
        self._users = users
        self._stage = stage
        self._index = index
        self.ranges = self._ranges_of(parameters)
        """The flat range of each parameter, by the `id` of the parameter."""
        self.place = index + 1 if stage == 3 and zero_optimizer.is_on_nvme(optimizer, index) else 0
        """0 for a partition in memory, a unique number for one on NVMe.

        Any read from NVMe loads the full partition, so tensors should be read place by place.
        """
        self.is_kept = False
        """Whether the partition stays in memory after a read."""
        self._is_loaded = False

    def _ranges_of(self, parameters: Iterable[Any]) -> dict[int, FlatRange]:
        if self._stage < 3:
            own = zero_optimizer.own_weights(self._optimizer, self._index)
            return {id(parameter): _range_within(own, parameter) for parameter in parameters}
        ranges, position = {}, 0
        for parameter in parameters:
            ranges[id(parameter)] = FlatRange(full_shape(parameter), *local_flat_range(parameter), position)
            position += parameter.ds_tensor.ds_numel
        return ranges

    @property
    def flat(self) -> Tensor:
        """The fp32 weights; empty while they are on NVMe."""
        return zero_optimizer.flat_weights(self._optimizer, self._stage, self._index)

    @property
    def state(self) -> dict[str, Any]:
        """The optimizer's state. Those of its tensors that are as long as `flat` are empty while `flat` is empty."""
        with self._users.flat():
            state: dict[str, Any] = self._optimizer.optimizer.state[self.flat]
        return state

    @property
    def has_own_memory(self) -> bool:
        """Whether saves read the weights here and not from fp32 parameters, which may hold averages for a while."""
        return self._stage == 3 and not zero_optimizer.shares_memory_with_parameters(self._optimizer, self._index)

    @property
    def counts_in_int(self) -> bool:
        """Whether the optimizer stores its step count as an `int`, as DeepSpeed's own do, and not as a tensor."""
        return type(self._optimizer.optimizer).__module__.startswith("deepspeed.ops")

    @contextmanager
    def in_memory(self, *, write: bool) -> Iterator[tuple[Tensor, dict[str, Any]]]:
        """Keep the flat tensor and its state in memory inside this context. With `write`, write changes back."""
        if self.place and not self._is_loaded:
            with self._users.flat():
                zero_optimizer.swap_in(self._optimizer, self._index)
            self._is_loaded = True
        try:
            yield self.flat, self.state
            if self.place and write:
                with self._users.flat():
                    zero_optimizer.swap_out(self._optimizer, self._index)
                self._is_loaded = False
        finally:
            if not self.is_kept:
                self.release()

    def release(self) -> None:
        """Free the memory of a partition on NVMe."""
        if self._is_loaded:
            zero_optimizer.release_buffers(self._optimizer, self._index)
            self._is_loaded = False

    def read(self, flat_range: FlatRange, key: str | None) -> Tensor:
        """Return a flat range of the fp32 weights, or of the optimizer's state `key`."""
        with self.in_memory(write=False) as (flat, state):
            values = (flat.detach() if key is None else state[key])[flat_range.slice]
            return values.clone() if self.place else values

    def publish(self) -> None:
        """At stage 3, update the weights that forward passes use from `flat`, which must be in memory.

        At stages 1 and 2, the caller sets these weights.
        """
        if self._stage == 3:
            zero_optimizer.copy_flat_weights_to_parameters(self._optimizer, self._index)


def _range_within(own: Tensor, parameter: Any) -> FlatRange:
    """Return the range of `parameter` that lies in `own`, this rank's part of the flat weights that it is a view of."""
    distance = (parameter.data_ptr() - own.data_ptr()) // own.element_size()
    start, position = max(0, -distance), max(0, distance)
    numel = min(parameter.numel() - start, own.numel() - position)
    return FlatRange(full_shape(parameter), *((start, numel, position) if numel > 0 else (0, 0, 0)))


_Writes = dict[Partition, list[tuple[FlatRange, Tensor]]]
"""Maps a partition to flat ranges in it, each with new values."""


class EngineShards:
    """This rank's shards of what one engine trains: flat ranges of fp32 weights and of the optimizer's state.

    Except for `has`, methods accept only parameters that the engine trains.

    Args:
        engine: the DeepSpeed engine.
        module: the module that contains the parameters.
        users: the user's optimizer.
    """

    def __init__(self, engine: "DeepSpeedEngine", module: Module, users: UsersOptimizer) -> None:
        self._stage: int = engine.zero_optimization_stage()
        self._optimizer: Any = engine.optimizer
        self.users = users
        self._parameters = dict(module.named_parameters())
        groups = zero_optimizer.groups_of_parameters(engine.optimizer, self._stage)
        self._partitions = [Partition(engine.optimizer, self._stage, n, group, users) for n, group in enumerate(groups)]
        self._partition_by_id = {id_: partition for partition in self._partitions for id_ in partition.ranges}
        self._stored: _Writes = {}
        self._keep_last = False

    def has(self, parameter: Parameter) -> bool:
        """Return whether the optimizer trains `parameter`, or did so when the run began."""
        return id(parameter) in self._partition_by_id

    # Weights

    def read_shard(self, parameter: Parameter) -> Tensor:
        """Return this rank's shard of the fp32 weight of `parameter`; the full fp32 weight at stages 1 and 2."""
        if self._stage < 3 and not self.has_master(parameter):
            return parameter.detach()
        return self._flat_shard(parameter, torch.float32, None)

    def has_master(self, parameter: Parameter) -> bool:
        """Return whether `parameter` has an fp32 master copy apart from the weight that forward passes use."""
        return parameter.dtype != torch.float32 or self._partition_by_id[id(parameter)].has_own_memory

    def local_flat_range(self, parameter: Parameter) -> tuple[int, int]:
        """Return the start and length of the range of the flattened `parameter` that this rank updates."""
        flat_range = self._partition_by_id[id(parameter)].ranges[id(parameter)]
        return flat_range.start, flat_range.numel

    def write_shard(self, parameter: Parameter, stored: Tensor) -> bool:
        """Set `stored` as the new fp32 weight of `parameter`. `write_masters` reads this rank's shard of it.

        Returns:
            bool: `True` at stage 3, where nothing else must be set; `False` at stages 1 and 2, where the caller sets
                the full weight that forward passes use.
        """
        partition = self._partition_by_id[id(parameter)]
        self._stored.setdefault(partition, []).append((partition.ranges[id(parameter)], stored))
        if self._stage == 3:
            write_gathered(parameter, stored)
        return self._stage == 3

    def write_masters(self) -> None:
        """Read the tensors given to `write_shard`, partition by partition, because each may be on NVMe."""
        stored, self._stored = self._stored, {}
        for partition, tensors in stored.items():
            with partition.in_memory(write=True) as (flat, _):
                for flat_range, values in tensors:
                    read_flat_range(values, flat_range.start, flat.data[flat_range.slice])
                partition.publish()

    def write_full_values(self, written: list[tuple[Parameter, Tensor]]) -> None:
        """Copy this rank's shards of full values, which every rank has, into the fp32 weights.

        An element of a master copy stays as it is if, cast to the dtype of the parameter, it equals the new value.
        """
        ranges = []
        for parameter, values in written:
            start, numel = self.local_flat_range(parameter)
            ranges.append((parameter, values.reshape(-1)[start : start + numel]))
            if self._stage == 3:
                write_gathered(parameter, values)
        self.write_flat_ranges(ranges)

    def write_flat_ranges(self, ranges: list[tuple[Parameter, Tensor]]) -> None:
        """Copy new values of this rank's flat ranges, each 1-dimensional, into the fp32 weights."""
        by_partition: _Writes = {}
        for parameter, values in ranges:
            partition = self._partition_by_id[id(parameter)]
            by_partition.setdefault(partition, []).append((partition.ranges[id(parameter)], values))
        for partition, shards in by_partition.items():
            with partition.in_memory(write=True) as (flat, _):
                for flat_range, shard in shards:
                    master = flat.data[flat_range.slice]
                    shard = shard.to(master.device)
                    master.copy_(torch.where(master.to(shard.dtype) == shard, master, shard.to(master.dtype)))
                partition.publish()

    def gather_weights(self) -> None:
        """At stages 1 and 2, give every rank the weights that the others update, as a step does. *Collective*."""
        if self._stage < 3:
            zero_optimizer.gather_weights(self._optimizer)

    @property
    def trained(self) -> dict[str, Parameter]:
        """The parameters that the engine trains, by name."""
        return {name: parameter for name, parameter in self._parameters.items() if self.has(parameter)}

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Return a context for reading many tensors, in which each partition on NVMe is read once."""
        self._keep_last = True
        try:
            yield
        finally:
            self._keep_last = False
            self._release_except(None)

    def _release_except(self, kept: Partition | None) -> None:
        for partition in self._partitions:
            partition.is_kept = self._keep_last and partition is kept
            if not partition.is_kept:
                partition.release()

    def _read(self, partition: Partition, flat_range: FlatRange, key: str | None) -> Tensor:
        if partition.place:
            self._release_except(partition)
        return partition.read(flat_range, key)

    # Optimizer

    def optimizer_state(self) -> State:
        """Return the optimizer's state, keyed by index of the parameter. Its tensors are `FlatShard`s."""
        names = [name for group_names in self.users.names for name in group_names]
        found = {name: self.parameter_state(self._parameters[name]) for name in names}
        state = {name: values for name, values in found.items() if values}
        groups = [
            hyper_parameters(group) | {"params": list(group_names)}
            for group, group_names in zip(self.users.groups, self.users.names, strict=True)
        ]
        return to_int_keys({"state": state, "param_groups": groups})

    def parameter_state(self, parameter: Parameter) -> dict[str, Any]:
        """Return the optimizer's state of `parameter`, with `FlatShard`s; empty if it has none.

        Raises:
            CheckpointError: the state is not one value per element.
        """
        partition = self._partition_by_id.get(id(parameter))
        if partition is None:
            return {}
        found: dict[str, Any] = {}
        for key, value in partition.state.items():
            if isinstance(value, Tensor) and value.shape == partition.flat.shape and value.dim():
                found[key] = self._flat_shard(parameter, value.dtype, key)
            elif isinstance(value, Tensor) and value.numel() > 1:
                raise CheckpointError(
                    f"The optimizer's state {key!r} has shape {tuple(value.shape)} for {partition.flat.numel()} "
                    "elements: it is not one value per element, and cannot be saved under ZeRO. Train with paral_ddp."
                )
            else:
                found[key] = torch.tensor(float(value)) if key == "step" else value
        return found

    def _flat_shard(self, parameter: Parameter, dtype: torch.dtype, key: str | None) -> FlatShard:
        """Return this rank's shard of the fp32 weight of `parameter`, or of its state `key`. It is read when needed."""
        partition = self._partition_by_id[id(parameter)]
        flat_range = partition.ranges[id(parameter)]
        return FlatShard(
            flat_range.shape,
            dtype,
            flat_range.start,
            flat_range.numel,
            lambda: self._read(partition, flat_range, key),
            partition.place,
        )

    def load_optimizer_state(self, saved: State) -> None:
        """Load the optimizer's saved state. This rank reads only its flat ranges.

        Raises:
            CheckpointError: it is the state of another optimizer, or its parameters took different numbers of steps.
        """
        checkpoint = SavedOptimizer(saved, self.users.names)
        for group, group_names in zip(self.users.groups, self.users.names, strict=True):
            group.update(checkpoint.hyper_parameters(group, group_names))
        names = {id(parameter): name for name, parameter in self._parameters.items()}
        for partition in self._partitions:
            found = {id_: checkpoint.state.get(names[id_], {}) for id_ in partition.ranges}
            with partition.in_memory(write=True) as (flat, state):
                _load_partition(partition, flat, state, found)


def _load_partition(
    partition: Partition, flat: Tensor, state: dict[str, Any], found: dict[int, dict[str, Any]]
) -> None:
    taken = {float(values.get("step", 1 if values else 0)) for values in found.values()}
    if len(taken) > 1:
        raise CheckpointError(
            f"Parameters in the checkpoint have taken different numbers of steps, {min(taken):g} to {max(taken):g}, as "
            "if some were frozen before. Under ZeRO they share one count. Resume under paral_fsdp, or load only the "
            "weights, with a new optimizer."
        )
    state.clear()
    for key in {key: None for parameter_state in found.values() for key in parameter_state}:
        values = {id_: parameter_state[key] for id_, parameter_state in found.items() if key in parameter_state}
        if key == "step":
            step = taken.pop()
            state[key] = int(step) if partition.counts_in_int else torch.tensor(step, dtype=torch.float32)
        elif _is_per_element(partition, values):
            state[key] = torch.zeros_like(flat, requires_grad=False)
            for id_, value in values.items():
                flat_range = partition.ranges[id_]
                read_flat_range(value, flat_range.start, state[key][flat_range.slice])
        else:
            first = next(iter(values.values()))
            state[key] = materialize(first).clone() if isinstance(first, Tensor) else first


def _is_per_element(partition: Partition, values: dict[int, Any]) -> bool:
    """Return whether a state has a value for each element of each parameter, and not one per parameter."""
    return all(
        isinstance(value, Tensor) and value.shape == partition.ranges[id_].shape for id_, value in values.items()
    )
