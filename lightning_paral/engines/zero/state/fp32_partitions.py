"""Flat fp32 tensors with this rank's shards of several parameters, and the optimizer's states; some are on NVMe."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lightning_paral.compat.deepspeed import subgroups
from lightning_paral.compat.deepspeed.masters import master_range_of
from lightning_paral.engines.zero.parameters.partition import flat_range_of, full_shape


@dataclass(frozen=True)
class FlatRange:
    """This rank's flat range of a parameter of the full `shape`, and its position in a partition."""

    shape: tuple[int, ...]
    start: int
    numel: int
    position: int

    @property
    def slice(self) -> slice:
        """Where the range lies in the flat tensor of the partition."""
        return slice(self.position, self.position + self.numel)


class Partition:
    """A flat fp32 tensor with this rank's flat ranges of several parameters, and the optimizer's state of it.

    Args:
        optimizer: DeepSpeed's.
        index: of the group, or sub-group at stage 3.
        ranges: where each parameter lies, by its `id`.
    """

    place = 0
    """0 in memory. On NVMe a number of its own: all of it is read for any part, so tensors are read place by place."""

    def __init__(self, optimizer: Any, index: int, ranges: dict[int, FlatRange]) -> None:
        self._optimizer = optimizer
        self._index = index
        self.ranges = ranges

    @contextmanager
    def opened(self, *, write: bool) -> Iterator[tuple[Tensor, dict[str, Any]]]:
        """Hold the flat tensor and its state in memory inside this context; with `write`, write changes back."""
        yield self.flat, self.state

    @property
    def flat(self) -> Tensor:
        """The fp32 weights; empty while they are on NVMe."""
        flat: Tensor = self._optimizer.single_partition_of_fp32_groups[self._index]
        return flat

    @property
    def state(self) -> dict[str, Any]:
        """The optimizer's state. Its tensors of the length of `flat` are empty while `flat` is."""
        state: dict[str, Any] = self._optimizer.optimizer.state[self.flat]
        return state

    def read(self, flat_range: FlatRange, key: str | None) -> Tensor:
        """Return a flat range of the fp32 weights, or of the optimizer's state `key`."""
        with self.opened(write=False) as (flat, state):
            values = flat.detach() if key is None else state[key]
            values = values[flat_range.slice]
            return values.clone() if self.place else values

    def publish(self) -> None:
        """Do nothing: at stages 1 and 2 the weights that are computed with are not made from `flat`."""

    @property
    def counts_in_int(self) -> bool:
        """Whether the optimizer keeps its number of steps as an `int`, as DeepSpeed's own do, and not as a tensor."""
        return type(self._optimizer.optimizer).__module__.startswith("deepspeed.ops")


class SubgroupSwapper:
    """Reads one sub-group at a time from NVMe, and keeps it in memory while a save reads it tensor by tensor.

    DeepSpeed reads and writes all of a sub-group at once: its weights and its optimizer's state.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._loaded: int | None = None
        self._is_kept = False

    def is_on_nvme(self, index: int) -> bool:
        """Whether the sub-group is on NVMe."""
        return subgroups.is_on_nvme(self._optimizer, index)

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """Keep the sub-group that was read last in memory, until another is read or this context ends."""
        self._is_kept = True
        try:
            yield
        finally:
            self._is_kept = False
            self._release()

    @contextmanager
    def reading(self, index: int) -> Iterator[None]:
        """Hold a sub-group in memory, for reading."""
        if self._loaded != index:
            self._release()
            self._read(index)
        try:
            yield
        finally:
            if not self._is_kept:
                self._release()

    @contextmanager
    def writing(self, index: int) -> Iterator[None]:
        """Hold a sub-group in memory, and write it back unless an exception is raised."""
        self._release()
        self._read(index)
        try:
            yield
            subgroups.swap_out(self._optimizer, index)
            self._loaded = None
        finally:
            self._release()

    def _read(self, index: int) -> None:
        subgroups.swap_in(self._optimizer, index)
        self._loaded = index

    def _release(self) -> None:
        if self._loaded is not None:
            subgroups.release_buffers(self._optimizer, self._loaded)
            self._loaded = None


class PartitionOfStage3(Partition):
    """A sub-group of stage 3, which may be on NVMe."""

    def __init__(self, optimizer: Any, index: int, ranges: dict[int, FlatRange], swapper: SubgroupSwapper) -> None:
        super().__init__(optimizer, index, ranges)
        self._swapper = swapper
        self.place = index + 1 if swapper.is_on_nvme(index) else 0

    @contextmanager
    def opened(self, *, write: bool) -> Iterator[tuple[Tensor, dict[str, Any]]]:
        """Hold the flat tensor and its state in memory inside this context; with `write`, write changes back."""
        if not self.place:
            yield self.flat, self.state
            return
        with self._swapper.writing(self._index) if write else self._swapper.reading(self._index):
            yield self.flat, self.state

    @property
    def flat(self) -> Tensor:
        """The fp32 weights; empty while they are on NVMe."""
        return subgroups.flat_weights(self._optimizer, self._index)

    @property
    def state(self) -> dict[str, Any]:
        """The optimizer's state. Its tensors of the length of `flat` are empty while `flat` is."""
        state: dict[str, Any] = subgroups.stepping_optimizer(self._optimizer, self._index).state[self.flat]
        return state

    def publish(self) -> None:
        """Compute with the weights that `flat`, which is opened, has now."""
        subgroups.copy_flat_weights_to_parameters(self._optimizer, self._index)


def partitions_of(optimizer: Any, stage: int, swapper: SubgroupSwapper) -> list[Partition]:
    """Return this rank's partitions of an optimizer of DeepSpeed's."""
    if stage < 3:
        return [Partition(optimizer, n, _ranges_of(group)) for n, group in enumerate(optimizer.bit16_groups)]
    return [
        PartitionOfStage3(optimizer, n, {id(p): _range_of_stage3(p, optimizer) for p in group}, swapper)
        for n, group in enumerate(optimizer.fp16_groups)
    ]


def _ranges_of(parameters: Sequence[Any]) -> dict[int, FlatRange]:
    ranges = {}
    for parameter in parameters:
        start, numel, position = master_range_of(parameter)
        ranges[id(parameter)] = FlatRange(full_shape(parameter), start, numel, position)
    return ranges


def _range_of_stage3(parameter: Any, optimizer: Any) -> FlatRange:
    position, share = subgroups.position_of(optimizer, parameter)
    start, numel = flat_range_of(parameter)
    assert numel <= share
    return FlatRange(full_shape(parameter), start, numel, position)
