"""What a rank holds under ZeRO: runs of fp32 weights and of optimizer state, in partitions that may be on NVMe."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from lightning_paral.checkpoint.held import TensorRun
from lightning_paral.checkpoint.optimizer import SavedOptimizer, State, by_number, group_names, hyper_parameters
from lightning_paral.checkpoint.stored import read_run, read_whole
from lightning_paral.errors import CheckpointError
from lightning_paral.zero.partition import is_partitioned

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine


@dataclass(frozen=True)
class UsersGroups:
    """The parameter groups as `configure_optimizers` made them. DeepSpeed puts its own tensors into them."""

    groups: list[dict[str, Any]]
    names: list[list[str]]

    @staticmethod
    def of(optimizer: Optimizer, module: Module) -> "UsersGroups":
        """Remember the groups of an optimizer that DeepSpeed has not seen yet."""
        return UsersGroups(list(optimizer.param_groups), group_names(optimizer, module))


@dataclass(frozen=True)
class Run:
    """This rank's run of a flattened parameter, and where it lies in its partition."""

    shape: tuple[int, ...]
    start: int
    numel: int
    position: int


class Partition:
    """A flat fp32 tensor with this rank's runs of several parameters, and the optimizer's state of it."""

    def __init__(self, optimizer: Any, index: int, runs: dict[int, Run]) -> None:
        self._optimizer = optimizer
        self._index = index
        self.runs = runs
        """By `id` of the parameter."""

    @contextmanager
    def opened(self, *, write: bool) -> Iterator[tuple[Tensor, dict[str, Any]]]:
        """Have the flat tensor and its state in memory; with `write`, put what was changed back."""
        yield self._flat(), self._state()

    def _flat(self) -> Tensor:
        flat: Tensor = self._optimizer.single_partition_of_fp32_groups[self._index]
        return flat

    def _state(self) -> dict[str, Any]:
        state: dict[str, Any] = self._optimizer.optimizer.state[self._flat()]
        return state

    def read(self, run: Run, key: str | None) -> Tensor:
        """Return this rank's run of the fp32 weight, or of the optimizer's state `key`."""
        with self.opened(write=False) as (flat, state):
            values = flat.detach() if key is None else state[key]
            return self._lasting(values[run.position : run.position + run.numel])

    def _lasting(self, values: Tensor) -> Tensor:
        return values

    @property
    def counts_in_int(self) -> bool:
        """Whether the optimizer keeps its number of steps as an `int`, as DeepSpeed's own do, and not as a tensor."""
        return type(self._optimizer.optimizer).__module__.startswith("deepspeed.ops")


class PartitionOfStage3(Partition):
    """A sub-group of stage 3, which may be swapped out."""

    @contextmanager
    def opened(self, *, write: bool) -> Iterator[tuple[Tensor, dict[str, Any]]]:
        """Have the flat tensor and its state in memory; with `write`, put what was changed back."""
        optimizer, index = self._optimizer, self._index
        swapped = optimizer._swappable_optimizer_subgroup(index)
        if swapped:
            optimizer._optimizer_states_and_gradient_swap_in(index)
        try:
            yield self._flat(), self._state()
            if write:
                optimizer._reassign_or_swap_out_partitioned_parameters(index)
                if swapped:
                    optimizer._optimizer_states_and_gradient_swap_out(index)
        finally:
            if swapped and not write:
                optimizer._release_swap_buffers(index)

    def _flat(self) -> Tensor:
        flat: Tensor = self._optimizer.fp32_partitioned_groups_flat[self._index]
        return flat

    def _state(self) -> dict[str, Any]:
        optimizer = self._optimizer
        on_device = optimizer.offload_optimizer and optimizer.subgroup_to_device[self._index] != "cpu"
        engine = optimizer.backup_optimizer if on_device else optimizer.optimizer
        state: dict[str, Any] = engine.state[self._flat()]
        return state

    def _lasting(self, values: Tensor) -> Tensor:
        return values.clone() if self._optimizer._swappable_optimizer_subgroup(self._index) else values


class Holdings:
    """What this rank holds of the parameters and the optimizer of one engine."""

    def __init__(self, engine: "DeepSpeedEngine", module: Module, users: UsersGroups) -> None:
        self._stage = engine.zero_optimization_stage()
        self._optimizer: Any = engine.optimizer
        self._users = users
        self._parameters = dict(module.named_parameters())
        self._partitions = self._find_partitions()
        self._partition_of = {id_: partition for partition in self._partitions for id_ in partition.runs}

    def _find_partitions(self) -> list[Partition]:
        optimizer = self._optimizer
        if self._stage < 3:
            return [Partition(optimizer, n, _runs_of(group)) for n, group in enumerate(optimizer.bit16_groups)]
        return [
            PartitionOfStage3(optimizer, n, {id(p): _run_of_stage3(p, optimizer) for p in group})
            for n, group in enumerate(optimizer.fp16_groups)
        ]

    # Weights

    def weight(self, parameter: Parameter) -> Tensor:
        """Return what this rank has of `parameter`: fp32 where a master copy exists."""
        partition = self._partition_of.get(id(parameter))
        if partition is None or (self._stage < 3 and parameter.dtype == torch.float32):
            return held(parameter)
        run = partition.runs[id(parameter)]
        return TensorRun(_shape(parameter), torch.float32, run.start, run.numel, lambda: partition.read(run, None))

    def fill(self, parameter: Parameter, stored: Tensor) -> bool:
        """Put a stored tensor into `parameter` and, where one exists, its fp32 master copy."""
        partition = self._partition_of.get(id(parameter))
        if partition is not None:
            run = partition.runs[id(parameter)]
            with partition.opened(write=True) as (flat, _):
                read_run(stored, run.start, flat.data[run.position : run.position + run.numel])
        return fill(parameter, stored)

    # Optimizer

    def optimizer_state(self) -> State:
        """Return the optimizer's state by parameter, tensors as runs of the true shapes."""
        state: dict[str, dict[str, Any]] = {}
        names = [name for of_group in self._users.names for name in of_group]
        for name in names:
            partition = self._partition_of.get(id(self._parameters[name]))
            if partition is not None:
                found = self._state_of(self._parameters[name], partition)
                if found:
                    state[name] = found
        groups = [
            hyper_parameters(group) | {"params": list(of_group)}
            for group, of_group in zip(self._users.groups, self._users.names, strict=True)
        ]
        return by_number({"state": state, "param_groups": groups})

    def _state_of(self, parameter: Parameter, partition: Partition) -> dict[str, Any]:
        run, shape = partition.runs[id(parameter)], _shape(parameter)
        found: dict[str, Any] = {}
        with partition.opened(write=False) as (flat, state):
            for key, value in state.items():
                if isinstance(value, Tensor) and value.shape == flat.shape and value.dim():
                    found[key] = TensorRun(shape, value.dtype, run.start, run.numel, _reading(partition, run, key))
                elif isinstance(value, Tensor) and value.numel() > 1:
                    raise CheckpointError(
                        f"The optimizer's state {key!r} has shape {tuple(value.shape)} for {flat.numel()} elements: it "
                        "is not one value per element, and cannot be saved under ZeRO."
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
            self._optimizer._hp_optimizer_states_linked = False
            if all(
                self._optimizer.optimizer.state.get(flat) for flat in self._optimizer.single_partition_of_fp32_groups
            ):
                self._optimizer._lazy_init_hp_params_optimizer_state()


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
                read_run(value, run.start, state[key][run.position : run.position + run.numel])
        else:
            first = next(iter(values.values()))
            state[key] = read_whole(first).clone() if isinstance(first, Tensor) else first


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


def _reading(partition: Partition, run: Run, key: str) -> Callable[[], Tensor]:
    return lambda: partition.read(run, key)


def _runs_of(parameters: Sequence[Any]) -> dict[int, Run]:
    runs = {}
    for parameter in parameters:
        mapping = parameter._hp_mapping
        if mapping is None:
            runs[id(parameter)] = Run(_shape(parameter), 0, 0, 0)
        else:
            address = mapping.lp_fragment_address
            position = mapping.hp_fragment_address.start
            runs[id(parameter)] = Run(_shape(parameter), address.start, address.numel, position)
    return runs


def _run_of_stage3(parameter: Any, optimizer: Any) -> Run:
    _, position, share = optimizer.grad_position[optimizer.get_param_id(parameter)]
    start, numel = run_of_partition(parameter)
    assert numel <= share
    return Run(_shape(parameter), start, numel, position)


def run_of_partition(parameter: Any) -> tuple[int, int]:
    """Return start and number of the elements this rank holds of a parameter of stage 3."""
    share = parameter.ds_tensor.ds_numel
    start = min(parameter.ds_numel, share * parameter.ds_zero_partition_rank)
    return start, min(share, parameter.ds_numel - start)


def _shape(parameter: Any) -> tuple[int, ...]:
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


# Parameters without an fp32 master copy: frozen ones, and all of them outside of training.


def held(parameter: Any) -> Tensor:
    """Return what this rank has of `parameter` as it is computed with."""
    if not hasattr(parameter, "ds_id"):
        whole: Tensor = parameter.detach()
        return whole
    start, numel = run_of_partition(parameter)

    def read() -> Tensor:
        with _swapped_in(parameter):
            values: Tensor = parameter.ds_tensor.data[:numel]
            return values.clone()

    return TensorRun(parameter.ds_shape, parameter.dtype, start, numel, read)


def fill(parameter: Any, stored: Tensor) -> bool:
    """Put a stored tensor into a partitioned `parameter`; `False` if it is whole."""
    if not hasattr(parameter, "ds_id"):
        return False
    start, numel = run_of_partition(parameter)
    with _swapped_in(parameter, write=True):
        read_run(stored, start, parameter.ds_tensor.data[:numel])
    if not is_partitioned(parameter):  # small ones are kept whole between steps
        parameter.data.copy_(read_whole(stored).view(parameter.data.shape))
    return True


@contextmanager
def _swapped_in(parameter: Any, write: bool = False) -> Iterator[None]:
    from deepspeed.runtime.swap_tensor.partitioned_param_swapper import PartitionedParamStatus

    swapped = getattr(parameter, "nvme_swapper", None) is not None and (
        parameter.ds_tensor.status == PartitionedParamStatus.NOT_AVAILABLE
    )
    if swapped:
        parameter.nvme_swapper.swap_in([parameter], async_op=False)
    yield
    if swapped and write:
        parameter.nvme_swapper.swap_out_and_release([parameter])
    elif swapped:
        parameter.nvme_swapper.remove_partition_and_release_buffers([parameter])
