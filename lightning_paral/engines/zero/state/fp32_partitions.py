"""Flat fp32 tensors with this rank's shards of several parameters, and their optimizer states; some are on NVMe."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lightning_paral.compat.deepspeed import optimizer as zero_optimizer
from lightning_paral.compat.deepspeed.optimizer import master_range_of
from lightning_paral.engines.zero.parameters.partition import full_shape, local_flat_range


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
        index: the index of the parameter group, or of the sub-group at stage 3.
        ranges: the flat range of each parameter, by the `id` of the parameter.
    """

    place = 0
    """0 for a partition in memory, a unique number for one on NVMe.

    Any read from NVMe loads the full partition, so tensors should be read place by place.
    """

    def __init__(self, optimizer: Any, index: int, ranges: dict[int, FlatRange]) -> None:
        self._optimizer = optimizer
        self._index = index
        self.ranges = ranges

    @property
    def has_own_memory(self) -> bool:
        """Whether saves read the weights here and not from fp32 parameters, which may hold averages for a while."""
        return False

    @contextmanager
    def in_memory(self, *, write: bool) -> Iterator[tuple[Tensor, dict[str, Any]]]:
        """Keep the flat tensor and its state in memory inside this context. With `write`, write changes back."""
        yield self.flat, self.state

    @property
    def flat(self) -> Tensor:
        """The fp32 weights; empty while they are on NVMe."""
        flat: Tensor = self._optimizer.single_partition_of_fp32_groups[self._index]
        return flat

    @property
    def state(self) -> dict[str, Any]:
        """The optimizer's state. Those of its tensors that are as long as `flat` are empty while `flat` is empty."""
        state: dict[str, Any] = self._optimizer.optimizer.state[self.flat]
        return state

    def read(self, flat_range: FlatRange, key: str | None) -> Tensor:
        """Return a flat range of the fp32 weights, or of the optimizer's state `key`."""
        with self.in_memory(write=False) as (flat, state):
            values = flat.detach() if key is None else state[key]
            values = values[flat_range.slice]
            return values.clone() if self.place else values

    def publish(self) -> None:
        """Do nothing. At stages 1 and 2, the caller sets the weights that forward passes use."""

    @property
    def counts_in_int(self) -> bool:
        """Whether the optimizer stores its step count as an `int`, as DeepSpeed's own do, and not as a tensor."""
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
        """Return whether the sub-group is on NVMe."""
        return zero_optimizer.is_on_nvme(self._optimizer, index)

    @contextmanager
    def keep_loaded(self) -> Iterator[None]:
        """Keep the last sub-group that was read in memory, until another is read or this context ends."""
        self._is_kept = True
        try:
            yield
        finally:
            self._is_kept = False
            self._release()

    @contextmanager
    def reading(self, index: int) -> Iterator[None]:
        """Keep a sub-group in memory for reading inside this context."""
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
        """Keep a sub-group in memory inside this context, then write it back, unless an exception is raised."""
        self._release()
        self._read(index)
        try:
            yield
            zero_optimizer.swap_out(self._optimizer, index)
            self._loaded = None
        finally:
            self._release()

    def _read(self, index: int) -> None:
        zero_optimizer.swap_in(self._optimizer, index)
        self._loaded = index

    def _release(self) -> None:
        if self._loaded is not None:
            zero_optimizer.release_buffers(self._optimizer, self._loaded)
            self._loaded = None


class Stage3Partition(Partition):
    """A sub-group of stage 3, which may be on NVMe."""

    def __init__(self, optimizer: Any, index: int, ranges: dict[int, FlatRange], swapper: SubgroupSwapper) -> None:
        super().__init__(optimizer, index, ranges)
        self._swapper = swapper
        self.place = index + 1 if swapper.is_on_nvme(index) else 0

    @property
    def has_own_memory(self) -> bool:
        """Whether the fp32 weights are not in the memory of the parameters' own shards."""
        return not zero_optimizer.shares_memory_with_parameters(self._optimizer, self._index)

    @contextmanager
    def in_memory(self, *, write: bool) -> Iterator[tuple[Tensor, dict[str, Any]]]:
        """Keep the flat tensor and its state in memory inside this context. With `write`, write changes back."""
        if not self.place:
            yield self.flat, self.state
            return
        with self._swapper.writing(self._index) if write else self._swapper.reading(self._index):
            yield self.flat, self.state

    @property
    def flat(self) -> Tensor:
        """The fp32 weights; empty while they are on NVMe."""
        return zero_optimizer.flat_weights(self._optimizer, self._index)

    @property
    def state(self) -> dict[str, Any]:
        """The optimizer's state. Those of its tensors that are as long as `flat` are empty while `flat` is empty."""
        state: dict[str, Any] = zero_optimizer.stepping_optimizer(self._optimizer, self._index).state[self.flat]
        return state

    def publish(self) -> None:
        """Update the weights that forward passes use from `flat`, which must be in memory."""
        zero_optimizer.copy_flat_weights_to_parameters(self._optimizer, self._index)


def make_partitions(optimizer: Any, stage: int, swapper: SubgroupSwapper) -> list[Partition]:
    """Return this rank's partitions of DeepSpeed's `optimizer`."""
    if stage < 3:
        return [Partition(optimizer, n, _flat_ranges(group)) for n, group in enumerate(optimizer.bit16_groups)]
    return [
        Stage3Partition(optimizer, n, {id(p): _stage3_flat_range(p, optimizer) for p in group}, swapper)
        for n, group in enumerate(optimizer.fp16_groups)
    ]


def _flat_ranges(parameters: Sequence[Any]) -> dict[int, FlatRange]:
    ranges = {}
    for parameter in parameters:
        start, numel, position = master_range_of(parameter)
        ranges[id(parameter)] = FlatRange(full_shape(parameter), start, numel, position)
    return ranges


def _stage3_flat_range(parameter: Any, optimizer: Any) -> FlatRange:
    position, padded_numel = zero_optimizer.position_of(optimizer, parameter)
    start, numel = local_flat_range(parameter)
    assert numel <= padded_numel
    return FlatRange(full_shape(parameter), start, numel, position)
