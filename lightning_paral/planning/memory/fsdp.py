"""Memory of FSDP2: parameters, gradients and optimizer states are sharded, and units are unsharded in turn.

It follows `FSDPParamGroup` of torch 2.11 to 2.13, with this package's reduce-scatter on CPU.
"""

from lightning_paral.comm.reduce_scatter import ARRIVING_BYTES
from lightning_paral.planning.layout import Layout
from lightning_paral.planning.memory.ledger import Item, Ledger, RankMemory
from lightning_paral.planning.settings import StepSettings
from lightning_paral.planning.states import ModelStates, ParameterState
from lightning_paral.planning.timeline import Kind, Timeline


def fsdp_memory(
    timeline: Timeline, states: ModelStates, num_ranks: int, settings: StepSettings, layout: Layout, *, on_cpu: bool
) -> RankMemory:
    """Return the memory of the rank that holds the most under FSDP.

    Args:
        timeline: a step with the batch of one rank.
        states: the states of the module.
        num_ranks: the number of ranks.
        settings: with mixed precision, unsharded parameters and gradients have 16 bits.
        layout: the number of replicas, over whose ranks each parameter is sharded; whether shards, their gradients and
            optimizer states are in host memory; and whether units are resharded after the forward pass.
        on_cpu: whether the device is the CPU, whose memory is host memory.
    """
    return _FSDP(timeline, states, num_ranks, settings, layout, on_cpu=on_cpu).follow()


class _FSDP:
    def __init__(
        self,
        timeline: Timeline,
        states: ModelStates,
        num_ranks: int,
        settings: StepSettings,
        layout: Layout,
        *,
        on_cpu: bool,
    ) -> None:
        self.timeline, self.states, self.num_ranks, self.on_cpu = timeline, states, num_ranks // layout.replicas, on_cpu
        self.is_mixed = settings.is_mixed
        self.is_offloaded = layout.parameter_place == "host" and not on_cpu
        self.reshards = layout.reshards
        self.ledger = Ledger()
        self.shards = [largest_shard_numel(state, self.num_ranks) for state in states.parameters]
        self.unit_of = {number: index for index, unit in enumerate(timeline.units) for number in unit.parameters}
        self.root = len(timeline.units) - 1
        self.is_unsharded = [False] * len(timeline.units)
        self.gathering: int | None = None
        """The unit whose all-gather buffer is allocated."""
        self.waiting: list[set[int]] = [set() for _ in timeline.units]
        """For each unit, the parameters whose gradients are not ready."""
        self.held: dict[int, int] = {}
        """Bytes of unsharded gradients, by parameter."""
        self.sharded_gradients: set[int] = set()
        self.reduced: int | None = None
        """The unit whose input of the reduce-scatter is allocated."""

    def follow(self) -> RankMemory:
        ledger, states = self.ledger, self.states
        sharded = [(state, shard) for state, shard in zip(states.parameters, self.shards, strict=True)]
        self._state(Item.PARAMETERS, sum(shard * state.dtype.itemsize for state, shard in sharded))
        self._state(
            Item.OPTIMIZER, sum(state.optimizer_bytes * shard / max(1, state.numel) for state, shard in sharded)
        )
        for number, state in enumerate(states.parameters):
            if state.is_trained:
                self.sharded_gradients.add(number)
                self._state(Item.GRADIENTS, self._sharded_gradient(number))
        ledger.add(Item.ACTIVATIONS, states.buffer_bytes + self.timeline.initial_bytes)
        in_backward = False
        fraction = sum(self.shards) / max(1, states.num_params)
        for kind, size, index in self.timeline.moments:
            if kind is Kind.ACTIVATION or (kind is Kind.CAST and not self.is_mixed):
                ledger.add(Item.ACTIVATIONS, size)
            elif kind is Kind.TEMPORARY:
                self._state(Item.ACTIVATIONS, int(size * fraction))
            elif kind is Kind.ENTER_FORWARD:
                in_backward = False if index == self.root else in_backward
                self._enter_forward(index)
            elif kind is Kind.LEAVE_FORWARD and not in_backward:
                self._leave_forward(index)
            elif kind is Kind.BACKWARD:
                in_backward = True
                self.waiting = [
                    {number for number in unit.parameters if states.parameters[number].is_trained}
                    for unit in self.timeline.units
                ]
            elif kind is Kind.ENTER_BACKWARD:
                self._enter_backward(index)
            elif kind is Kind.GRADIENT and size > 0:
                self._hold_gradient(index)
            elif kind is Kind.GRADIENT:
                self._free_gradient(index)
            elif kind is Kind.READY:
                self._ready(index)
            elif kind is Kind.OPTIMIZER:
                self._end_backward()
        return ledger.result()

    def _state(self, item: Item, num_bytes: float) -> None:
        if self.is_offloaded:
            self.ledger.host_bytes += int(num_bytes)
        else:
            self.ledger.add(item, num_bytes)

    def _itemsize(self, number: int) -> int:
        return 2 if self.is_mixed else self.states.parameters[number].dtype.itemsize

    def _gathered(self, index: int) -> int:
        """Return the size of the all-gather's output in bytes, with padding."""
        return sum(
            self.shards[number] * self.num_ranks * self._itemsize(number)
            for number in self.timeline.units[index].parameters
        )

    def _unsharded(self, index: int) -> int:
        return self._gathered(index)  # with padding: a parameter is a view of its all-gather output

    def _sharded_gradient(self, number: int) -> int:
        return self.shards[number] * self.states.parameters[number].dtype.itemsize

    def _enter_forward(self, index: int) -> None:
        if self.is_unsharded[index]:
            return
        if self.num_ranks > 1:
            self._cast_shards(index)
            self.ledger.add(Item.COMMUNICATION, self._gathered(index))
            self._free_gathered()
            self.gathering = index
        self.is_unsharded[index] = True
        self.ledger.add(Item.COMMUNICATION, self._unsharded(index))

    def _cast_shards(self, index: int) -> None:
        if self.is_mixed or self.is_offloaded:
            self.ledger.pulse(Item.COMMUNICATION, self._gathered(index) / self.num_ranks)

    def _free_gathered(self) -> None:
        if self.gathering is not None:
            self.ledger.add(Item.COMMUNICATION, -self._gathered(self.gathering))
            self.gathering = None

    def _leave_forward(self, index: int) -> None:
        if index == self.root:
            self._free_gathered()
        elif self.reshards:
            self._reshard(index)

    def _reshard(self, index: int) -> None:
        if self.is_unsharded[index]:
            self.is_unsharded[index] = False
            self.ledger.add(Item.COMMUNICATION, -self._unsharded(index))

    def _enter_backward(self, index: int) -> None:
        for other, waiting in enumerate(self.waiting):
            if other not in (index, self.root) and not waiting and index < other:
                self._reshard(other)  # frozen
        if not self.is_unsharded[index]:
            if self.num_ranks > 1 and self.gathering != index:
                self._free_gathered()
                self._cast_shards(index)
                self.ledger.add(Item.COMMUNICATION, self._gathered(index))
                self.gathering = index
            self.is_unsharded[index] = True
            self.ledger.add(Item.COMMUNICATION, self._unsharded(index))
            self._free_gathered()
        following = (self.root if index == self.root else index) - 1
        if following >= 0 and self.num_ranks > 1 and not self.is_unsharded[following] and self.gathering is None:
            self._cast_shards(following)
            self.ledger.add(Item.COMMUNICATION, self._gathered(following))
            self.gathering = following

    def _hold_gradient(self, number: int) -> None:
        if number not in self.held:
            size = self.states.parameters[number].numel * self._itemsize(number)
            self.held[number] = size
            self.ledger.add(Item.GRADIENTS, size)

    def _free_gradient(self, number: int) -> None:
        if number in self.sharded_gradients:
            self.sharded_gradients.discard(number)
            if not self.is_offloaded:
                self.ledger.add(Item.GRADIENTS, -self._sharded_gradient(number))
            else:
                self.ledger.host_bytes -= self._sharded_gradient(number)

    def _ready(self, number: int) -> None:
        self._hold_gradient(number)
        index = self.unit_of[number]
        self.waiting[index].discard(number)
        if not self.waiting[index] and index != self.root:
            self._reduce(index)

    def _reduce(self, index: int) -> None:
        """Reduce-scatter the gradients of a unit."""
        numbers = [number for number in self.timeline.units[index].parameters if number in self.held]
        if not numbers:
            self._reshard(index)
            return
        self._reshard(index)
        self._free_reduced()
        itemsizes = {number: self.states.parameters[number].dtype.itemsize for number in numbers}
        shard = sum(self.shards[number] * itemsizes[number] for number in numbers)
        self.ledger.add(Item.COMMUNICATION, shard * self.num_ranks)
        self.reduced = index
        self._reduced_bytes = shard * self.num_ranks
        for number in numbers:
            self.ledger.add(Item.GRADIENTS, -self.held.pop(number))
        self._state(Item.GRADIENTS, shard)
        if self.on_cpu and self.num_ranks > 1:
            self.ledger.pulse(Item.COMMUNICATION, min(ARRIVING_BYTES, shard * (self.num_ranks - 1)))
            self._free_reduced()
        for number in numbers:
            if number in self.sharded_gradients:  # accumulated into the gradient of earlier micro-batches
                self._state(Item.GRADIENTS, -self._sharded_gradient(number))
            self.sharded_gradients.add(number)

    def _free_reduced(self) -> None:
        if self.reduced is not None:
            self.ledger.add(Item.COMMUNICATION, -self._reduced_bytes)
            self.reduced = None

    def _end_backward(self) -> None:
        for index in range(len(self.timeline.units)):
            self._reduce(index)
        self._free_gathered()
        self._free_reduced()


def largest_shard_numel(state: ParameterState, num_ranks: int) -> int:
    """Return the elements of the largest shard: FSDP2 divides the first dimension."""
    if not state.shape:
        return 1
    first, rest = state.shape[0], state.numel // max(1, state.shape[0])
    return -(-first // num_ranks) * rest
