"""What a rank holds under ZeRO: runs of fp32 weights and of optimizer state, for a checkpoint and from one."""

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.nn import Module, Parameter

from lightning_paral.checkpoint.lazy_tensor import materialize, read_flat_range
from lightning_paral.checkpoint.shards import FlatShard
from lightning_paral.checkpoint.state.optimizer import SavedOptimizer, State, hyper_parameters, to_int_keys
from lightning_paral.compat.deepspeed.masters import link_states, link_states_of_next_step
from lightning_paral.compat.deepspeed.overlap import overlaps
from lightning_paral.engines.zero.gradients.usage import Usage
from lightning_paral.engines.zero.offload.nvme_swap import Swapping
from lightning_paral.engines.zero.optimizer.twin import UsersOptimizer
from lightning_paral.engines.zero.parameters.masterless import fill, fill_gathered, held
from lightning_paral.engines.zero.parameters.partition import run_of_partition
from lightning_paral.engines.zero.state.fp32_partitions import Partition, Run, partitions_of
from lightning_paral.errors import CheckpointError

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine


class ZeroCheckpointState:
    """What this rank holds of the parameters and the optimizer of one engine."""

    def __init__(self, engine: "DeepSpeedEngine", module: Module, users: UsersOptimizer) -> None:
        self._stage: int = engine.zero_optimization_stage()
        self._optimizer: Any = engine.optimizer
        self._users = users
        self._parameters = dict(module.named_parameters())
        self._swapping = Swapping(engine.optimizer)
        self._partitions = partitions_of(engine.optimizer, self._stage, self._swapping)
        self._partition_of = {id_: partition for partition in self._partitions for id_ in partition.runs}
        self._usage: Usage | None = None
        self._stored: dict[Partition, list[tuple[Run, Tensor]]] = {}

    def of(self, optimizer: Any) -> "ZeroCheckpointState":
        """Return what this rank holds of `optimizer`: of the only one there is."""
        return self

    def has(self, parameter: Parameter) -> bool:
        """Whether the optimizer trains `parameter`, or did when the run began."""
        return id(parameter) in self._partition_of

    # Weights

    def weight(self, parameter: Parameter) -> Tensor:
        """Return what this rank has of `parameter`: fp32 where a master copy exists."""
        if not self.saves_master_of(parameter):
            return held(parameter)
        return _tensor_run(self._partition_of[id(parameter)], parameter, torch.float32, None)

    def saves_master_of(self, parameter: Parameter) -> bool:
        """Whether `weight` returns the fp32 master copy of `parameter`, and not what is computed with."""
        is_copy_only = self._stage < 3 and parameter.dtype == torch.float32
        return id(parameter) in self._partition_of and not is_copy_only

    def run_of(self, parameter: Any) -> tuple[int, int]:
        """Return start and number of the elements of flattened `parameter` that this rank updates, or holds if frozen.

        All of them where every rank holds it whole, and none updates it.
        """
        if hasattr(parameter, "ds_id"):
            return run_of_partition(parameter)
        partition = self._partition_of.get(id(parameter))
        if partition is None:
            return 0, parameter.numel()
        run = partition.runs[id(parameter)]
        return run.start, run.numel

    def fill(self, parameter: Parameter, stored: Tensor) -> bool:
        """Put a stored tensor into `parameter` and, once `write_masters` is called, its fp32 master copy.

        Returns:
            bool: whether that is all; else the weight that is computed with is left to the caller.
        """
        partition = self._partition_of.get(id(parameter))
        if partition is None:
            return fill(parameter, stored)
        self._stored.setdefault(partition, []).append((partition.runs[id(parameter)], stored))
        if self._stage == 3:
            fill_gathered(parameter, stored)
        return self._stage == 3

    def write_masters(self) -> None:
        """Put the tensors of all calls of `fill` where they belong, partition by partition."""
        stored, self._stored = self._stored, {}
        for partition, runs in stored.items():
            with partition.opened(write=True) as (flat, _):
                for run, values in runs:
                    read_flat_range(values, run.start, flat.data[run.position : run.position + run.numel])
                partition.publish()

    def adopt(self, written: list[tuple[Parameter, Tensor]]) -> None:
        """Take over the whole values that parameters were given during the run: this rank's runs, where they are kept.

        A master copy of higher precision changes only where the values are others than its own, rounded.
        """
        by_partition: dict[Partition, list[tuple[Run, Tensor]]] = {}
        for parameter, values in written:
            partition = self._partition_of.get(id(parameter))
            if partition is None:
                fill(parameter, values)
                continue
            run = partition.runs[id(parameter)]
            part = values.reshape(-1)[run.start : run.start + run.numel]
            by_partition.setdefault(partition, []).append((run, part))
            if self._stage == 3:
                fill_gathered(parameter, values)
        self._write_runs(by_partition)

    def adopt_runs(self, runs: list[tuple[Parameter, Tensor]]) -> None:
        """Give master copies the values of this rank's runs, 1-dimensional, where parameters have such copies."""
        by_partition: dict[Partition, list[tuple[Run, Tensor]]] = {}
        for parameter, values in runs:
            partition = self._partition_of.get(id(parameter))
            if partition is not None:
                by_partition.setdefault(partition, []).append((partition.runs[id(parameter)], values))
        self._write_runs(by_partition)

    def _write_runs(self, by_partition: dict[Partition, list[tuple[Run, Tensor]]]) -> None:
        for partition, parts in by_partition.items():
            with partition.opened(write=True) as (flat, _):
                for run, part in parts:
                    master = flat.data[run.position : run.position + run.numel]
                    part = part.to(master.device)
                    master.copy_(torch.where(master.to(part.dtype) == part, master, part.to(master.dtype)))
                partition.publish()

    def watch_usage(self, *, find_unused: bool) -> Usage:
        """Note from now on which parameters get gradients, and let the optimizer leave the others as they are."""
        trained = [(name, p) for name, p in self._parameters.items() if id(p) in self._partition_of and p.requires_grad]
        in_order = self._stage > 1 or overlaps(self._optimizer)
        usage = Usage(trained, self._partitions, find_unused=find_unused, in_order=in_order)
        self._usage = usage
        usage.guard(self._optimizer.optimizer)
        if getattr(self._optimizer, "backup_optimizer", None) is not None:  # of what is not offloaded
            usage.guard(self._optimizer.backup_optimizer)
        return usage

    def in_memory(self) -> AbstractContextManager[None]:
        """Return a context for reading what this rank holds tensor by tensor, in which NVMe is read less often."""
        return self._swapping.staying()

    # Optimizer

    def optimizer_state(self) -> State:
        """Return the optimizer's state by parameter, tensors as runs of the true shapes."""
        state: dict[str, dict[str, Any]] = {}
        names = [name for of_group in self._users.names for name in of_group]
        for name in names:
            partition = self._partition_of.get(id(self._parameters[name]))
            if partition is not None and (self._usage is None or self._usage.has_state(self._parameters[name])):
                found = self._state_of(self._parameters[name], partition)
                if found:
                    state[name] = found
        groups = [
            hyper_parameters(group) | {"params": list(of_group)}
            for group, of_group in zip(self._users.groups, self._users.names, strict=True)
        ]
        return to_int_keys({"state": state, "param_groups": groups})

    def _state_of(self, parameter: Parameter, partition: Partition) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in partition.state.items():
            if isinstance(value, Tensor) and value.shape == partition.flat.shape and value.dim():
                found[key] = _tensor_run(partition, parameter, value.dtype, key)
            elif isinstance(value, Tensor) and value.numel() > 1:
                raise CheckpointError(
                    f"The optimizer's state {key!r} has shape {tuple(value.shape)} for {partition.flat.numel()} "
                    "elements: it is not one value per element, and cannot be saved under ZeRO."
                )
            else:
                found[key] = torch.tensor(float(value)) if key == "step" else value
        return found

    def load_optimizer_state(self, saved: State) -> None:
        """Give the optimizer its saved state; this rank reads only its runs.

        Raises:
            CheckpointError: it is the state of another optimizer.
        """
        checkpoint = SavedOptimizer(saved, self._users.names)
        for group, of_group in zip(self._users.groups, self._users.names, strict=True):
            group.update(checkpoint.hyper_parameters(group, of_group))
        names = {id(parameter): name for name, parameter in self._parameters.items()}
        for partition in self._partitions:
            found = {id_: checkpoint.state.get(names[id_], {}) for id_ in partition.runs}
            with partition.opened(write=True) as (flat, state):
                _load_partition(partition, flat, state, found)
        if self._stage < 3:
            link_states_of_next_step(self._optimizer)
            if all(
                self._optimizer.optimizer.state.get(flat) for flat in self._optimizer.single_partition_of_fp32_groups
            ):
                link_states(self._optimizer)


def _load_partition(
    partition: Partition, flat: Tensor, state: dict[str, Any], found: dict[int, dict[str, Any]]
) -> None:
    state.clear()
    for key in {key: None for of_parameter in found.values() for key in of_parameter}:
        values = {id_: of_parameter[key] for id_, of_parameter in found.items() if key in of_parameter}
        if key == "step":
            state[key] = _common_step(values.values(), in_int=partition.counts_in_int)
        elif _is_per_element(partition, values):
            state[key] = torch.zeros_like(flat, requires_grad=False)
            for id_, value in values.items():
                run = partition.runs[id_]
                read_flat_range(value, run.start, state[key][run.position : run.position + run.numel])
        else:
            first = next(iter(values.values()))
            state[key] = materialize(first).clone() if isinstance(first, Tensor) else first


def _is_per_element(partition: Partition, values: dict[int, Any]) -> bool:
    """Whether a state has a value for each element of each parameter, and not one for the whole parameter."""
    return all(isinstance(value, Tensor) and value.shape == partition.runs[id_].shape for id_, value in values.items())


def _common_step(steps: Iterable[Any], *, in_int: bool) -> Any:
    taken = {float(step) for step in steps}
    if len(taken) > 1:
        rank_zero_warn(
            f"In the checkpoint parameters have taken different numbers of steps, {min(taken):g} to {max(taken):g}. "
            "Under ZeRO they count together: all continue from the largest."
        )
    return int(max(taken)) if in_int else torch.tensor(max(taken), dtype=torch.float32)


def _tensor_run(partition: Partition, parameter: Parameter, dtype: torch.dtype, key: str | None) -> FlatShard:
    run = partition.runs[id(parameter)]
    return FlatShard(run.shape, dtype, run.start, run.numel, lambda: partition.read(run, key), partition.place)
