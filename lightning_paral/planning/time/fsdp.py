"""The time of a step under FSDP2: units are gathered before their use, and their gradients reduced after it.

It follows `FSDPParamGroup` of torch 2.11 to 2.13. On CUDA, the all-gather of a unit overlaps with the computation of
the one before, and the reduce-scatter with that of the next: https://docs.pytorch.org/docs/stable/notes/fsdp.html. On
CPU, there are no streams: every collective blocks.
"""

from collections.abc import Iterable

from lightning_paral.planning.memory.fsdp import largest_shard_numel
from lightning_paral.planning.settings import StepSettings
from lightning_paral.planning.states import ModelStates
from lightning_paral.planning.time.collectives import Collectives
from lightning_paral.planning.time.streams import Streams
from lightning_paral.planning.timeline import Kind, Moment, PlannedUnit


class FSDPStep:
    """Runs micro-batches on two streams.

    Args:
        states: the states of the module.
        units: what is gathered together, the root last.
        settings: with mixed precision, 16 bits per parameter are gathered.
        shards: the costs of collectives among the ranks that share a copy of the model.
        replicas: the costs of collectives among the ranks that hold the same shards.
        flops: floating-point operations per second.
        reshards: whether units are sharded again between forward and backward.
        on_cpu: whether every collective blocks.
    """

    def __init__(
        self,
        states: ModelStates,
        units: tuple[PlannedUnit, ...],
        settings: StepSettings,
        shards: Collectives,
        replicas: Collectives,
        flops: float,
        *,
        reshards: bool,
        on_cpu: bool,
    ) -> None:
        self.streams = Streams()
        self._shards, self._replicas, self._flops = shards, replicas, flops
        self._reshards, self._on_cpu = reshards, on_cpu
        self._root = len(units) - 1
        padded = [largest_shard_numel(state, shards.num_ranks) * shards.num_ranks for state in states.parameters]
        sizes = [state.dtype.itemsize for state in states.parameters]
        self._gather_seconds, self._reduce_seconds = [], []
        self._copy_out_seconds, self._copy_in_seconds = [], []
        self._trained = []
        for unit in units:
            gathered = sum(padded[number] * (2 if settings.is_mixed else sizes[number]) for number in unit.parameters)
            trained = {number for number in unit.parameters if states.parameters[number].is_trained}
            reduced = sum(padded[number] * sizes[number] for number in trained)
            self._gather_seconds.append(shards.all_gather(gathered) if gathered else 0.0)
            self._reduce_seconds.append(self._reduce_scatter(reduced) if reduced else 0.0)
            self._copy_out_seconds.append(shards.copy(gathered))
            self._copy_in_seconds.append(shards.copy(2 * reduced))  # to the buffer, and what arrives is added
            self._trained.append(trained)
        self._unit_of = {number: index for index, unit in enumerate(units) for number in unit.parameters}
        self._is_unsharded = [False] * len(units)
        self._gathered: dict[int, float] = {}
        """For each unit that is being gathered, when this ends."""

    def run(self, moments: Iterable[Moment], *, is_last: bool) -> None:
        """Run a micro-batch. Gradients are reduced in each."""
        in_backward = False
        begins = [self.streams.now]
        """When the computation of each unit of the forward pass begins."""
        waiting = [set(trained) for trained in self._trained]
        reduced = None
        for kind, size, number in moments:
            if kind is Kind.COMPUTE:
                self.streams.compute(size / self._flops)
            elif kind is Kind.BACKWARD:
                in_backward = True
            elif kind is Kind.ENTER_FORWARD and not self._is_unsharded[number]:
                # An all-gather waits until the memory of the last but one has been copied out.
                self._gather(number, None if self._on_cpu else begins[-2:][0])
                self._use(number)
                begins.append(self.streams.now)
            elif kind is Kind.LEAVE_FORWARD and not in_backward and number != self._root:
                self._is_unsharded[number] = not self._reshards
            elif kind is Kind.ENTER_BACKWARD:
                self._gather(number)
                self._use(number)
                following = (self._root if number == self._root else number) - 1
                if following >= 0:
                    self._gather(following)
            elif kind is Kind.READY:
                index = self._unit_of[number]
                waiting[index].discard(number)
                if not waiting[index] and index != self._root:
                    self._is_unsharded[index] = False
                    if reduced is not None:  # its memory is used again
                        self.streams.wait(reduced)
                    reduced = self._reduce(index)
        self.streams.wait(self._reduce(self._root))

    def end(self) -> None:
        """Do what follows the last backward pass: the root is sharded again."""
        self._is_unsharded[self._root] = False

    def end_step(self) -> None:
        """Do what follows the optimizer: nothing."""

    def _gather(self, index: int, earliest: float | None = None) -> None:
        if not self._is_unsharded[index] and index not in self._gathered:
            self._gathered[index] = self._start(self._gather_seconds[index], earliest)

    def _use(self, index: int) -> None:
        if index in self._gathered:
            self.streams.wait(self._gathered.pop(index))
            self.streams.compute(self._copy_out_seconds[index])
            self._is_unsharded[index] = True

    def _reduce(self, index: int) -> float:
        self.streams.compute(self._copy_in_seconds[index])
        return self._start(self._reduce_seconds[index])

    def _start(self, seconds: float, earliest: float | None = None) -> float:
        end = self.streams.start(seconds, earliest)
        if self._on_cpu:
            self.streams.wait(end)
        return end

    def _reduce_scatter(self, num_bytes: float) -> float:
        """Return the seconds in which gradients are reduced to their shards, and these among replicas."""
        scatter = self._shards.direct_reduce_scatter if self._on_cpu else self._shards.reduce_scatter
        return scatter(num_bytes) + self._replicas.all_reduce(num_bytes / self._shards.num_ranks)
