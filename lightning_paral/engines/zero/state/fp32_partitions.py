"""Flat fp32 tensors with this rank's runs of several parameters, and the optimizer's state of each; maybe on NVMe."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lightning_paral.compat.deepspeed import subgroups
from lightning_paral.compat.deepspeed.masters import master_run_of
from lightning_paral.engines.zero.parameters.partition import flat_range_of, full_shape


@dataclass(frozen=True)
class FlatRange:
    """This rank's run of a flattened parameter, and where it lies in its partition."""

    shape: tuple[int, ...]
    start: int
    numel: int
    position: int


class Partition:
    """A flat fp32 tensor with this rank's runs of several parameters, and the optimizer's state of it."""

    place = 0
    """Other than 0 where it has to be read from NVMe, all of it for any part: tensors are best read place by place."""

    def __init__(self, optimizer: Any, index: int, ranges: dict[int, FlatRange]) -> None:
        self._optimizer = optimizer
        self._index = index
        self.ranges = ranges
        """By `id` of the parameter."""

    @contextmanager
    def opened(self, *, write: bool) -> Iterator[tuple[Tensor, dict[str, Any]]]:
        """Have the flat tensor and its state in memory; with `write`, put what was changed back."""
        yield self.flat, self.state

    @property
    def flat(self) -> Tensor:
        """The fp32 weights; empty while they are on NVMe."""
        flat: Tensor = self._optimizer.single_partition_of_fp32_groups[self._index]
        return flat

    @property
    def state(self) -> dict[str, Any]:
        """The optimizer's state, of which tensors as long as `flat` are empty as long as `flat` is."""
        state: dict[str, Any] = self._optimizer.optimizer.state[self.flat]
        return state

    def read(self, run: FlatRange, key: str | None) -> Tensor:
        """Return this rank's run of the fp32 weight, or of the optimizer's state `key`."""
        with self.opened(write=False) as (flat, state):
            values = flat.detach() if key is None else state[key]
            values = values[run.position : run.position + run.numel]
            return values.clone() if self.place else values

    def publish(self) -> None:
        """Compute with the weights as they are now in `flat`, which is opened. Stages 1 and 2 hold them elsewhere."""

    @property
    def counts_in_int(self) -> bool:
        """Whether the optimizer keeps its number of steps as an `int`, as DeepSpeed's own do, and not as a tensor."""
        return type(self._optimizer.optimizer).__module__.startswith("deepspeed.ops")


class Swapping:
    """Brings one sub-group at a time into memory, and leaves it there while a save reads it tensor by tensor.

    DeepSpeed reads and writes a sub-group whole: its weights and all of its optimizer's state.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._inside: int | None = None
        self._staying = False

    def concerns(self, index: int) -> bool:
        """Whether the sub-group is on NVMe."""
        return subgroups.is_on_nvme(self._optimizer, index)

    @contextmanager
    def staying(self) -> Iterator[None]:
        """Leave the sub-group that was read last in memory, until another is read or this context ends."""
        self._staying = True
        try:
            yield
        finally:
            self._staying = False
            self._release()

    @contextmanager
    def reading(self, index: int) -> Iterator[None]:
        """Have a sub-group in memory, to look at it only."""
        if self._inside != index:
            self._release()
            self._read(index)
        try:
            yield
        finally:
            if not self._staying:
                self._release()

    @contextmanager
    def writing(self, index: int) -> Iterator[None]:
        """Have a sub-group in memory, and write it back unless there is an error."""
        self._release()
        self._read(index)
        try:
            yield
            subgroups.swap_out(self._optimizer, index)
            self._inside = None
        finally:
            self._release()

    def _read(self, index: int) -> None:
        subgroups.swap_in(self._optimizer, index)
        self._inside = index

    def _release(self) -> None:
        if self._inside is not None:
            subgroups.let_go(self._optimizer, self._inside)
            self._inside = None


class PartitionOfStage3(Partition):
    """A sub-group of stage 3, which may be on NVMe."""

    def __init__(self, optimizer: Any, index: int, ranges: dict[int, FlatRange], swapping: Swapping) -> None:
        super().__init__(optimizer, index, ranges)
        self._swapping = swapping
        self.place = index + 1 if swapping.concerns(index) else 0

    @contextmanager
    def opened(self, *, write: bool) -> Iterator[tuple[Tensor, dict[str, Any]]]:
        """Have the flat tensor and its state in memory; with `write`, put what was changed back."""
        if not self.place:
            yield self.flat, self.state
            return
        with self._swapping.writing(self._index) if write else self._swapping.reading(self._index):
            yield self.flat, self.state

    @property
    def flat(self) -> Tensor:
        """The fp32 weights; empty while they are on NVMe."""
        return subgroups.flat_weights(self._optimizer, self._index)

    @property
    def state(self) -> dict[str, Any]:
        """The optimizer's state, of which tensors as long as `flat` are empty as long as `flat` is."""
        state: dict[str, Any] = subgroups.stepping_optimizer(self._optimizer, self._index).state[self.flat]
        return state

    def publish(self) -> None:
        """Compute with the weights as they are now in `flat`, which is opened."""
        subgroups.compute_with_flat_weights(self._optimizer, self._index)


def partitions_of(optimizer: Any, stage: int, swapping: Swapping) -> list[Partition]:
    """Return what this rank holds of an optimizer of DeepSpeed's."""
    if stage < 3:
        return [Partition(optimizer, n, _ranges_of(group)) for n, group in enumerate(optimizer.bit16_groups)]
    return [
        PartitionOfStage3(optimizer, n, {id(p): _range_of_stage3(p, optimizer) for p in group}, swapping)
        for n, group in enumerate(optimizer.fp16_groups)
    ]


def _ranges_of(parameters: Sequence[Any]) -> dict[int, FlatRange]:
    runs = {}
    for parameter in parameters:
        start, numel, position = master_run_of(parameter)
        runs[id(parameter)] = FlatRange(full_shape(parameter), start, numel, position)
    return runs


def _range_of_stage3(parameter: Any, optimizer: Any) -> FlatRange:
    position, share = subgroups.position_of(optimizer, parameter)
    start, numel = flat_range_of(parameter)
    assert numel <= share
    return FlatRange(full_shape(parameter), start, numel, position)
