"""Memory of ZeRO on DeepSpeed.

It follows `DeepSpeedZeroOptimizer` and `DeepSpeedZeroOptimizer_Stage3` of deepspeed 0.19, with the buckets and the
collectives on gloo of this package.
"""

from collections import deque

from lightning_paral.comm.reduce_scatter import ARRIVING_BYTES
from lightning_paral.planning.layout import Layout
from lightning_paral.planning.memory.ledger import Item, Ledger, RankMemory
from lightning_paral.planning.memory.model_states import largest_part
from lightning_paral.planning.settings import StepSettings
from lightning_paral.planning.states import ModelStates
from lightning_paral.planning.timeline import Kind, Timeline

CPU_BUCKET = 6_553_600
"""Elements of a bucket on CPU."""
CUDA_BUCKET = 50_000_000
_MAX_IN_FLIGHT = 50 * 2**20
"""Bytes of gradients that a rank on gloo has sent and still holds, unless one message is larger."""
_MAX_GATHERED = 25 * 2**20
"""Bytes of a piece of an all-gather on gloo at stages 1 and 2."""
_PIECE = 4 * 2**20
"""Bytes of each of the two temporary tensors of Adam on CPU, which steps in pieces."""
PERSISTENT_NUMEL = 100_000
"""Stage 3 does not partition parameters with fewer elements."""


def zero_memory(
    timeline: Timeline, states: ModelStates, num_ranks: int, settings: StepSettings, layout: Layout, *, on_cpu: bool
) -> RankMemory:
    """Return the memory of the rank that needs the most under ZeRO.

    Args:
        timeline: a step with the batch of one rank.
        states: the states of the module.
        num_ranks: the number of ranks.
        settings: with 16-bit parameters, the optimizer works on fp32 copies.
        layout: the stage, and where states are.
        on_cpu: whether the device is the CPU, whose memory is host memory.
    """
    if layout.stage == 3:
        return _Stage3(timeline, states, num_ranks, settings, layout, on_cpu=on_cpu).follow()
    ranks = {0, num_ranks - 1}  # the backward pass reaches the shards of the last rank first
    found = [
        _Stage1And2(timeline, states, num_ranks, settings, layout, rank=rank, on_cpu=on_cpu).follow() for rank in ranks
    ]
    return max(found, key=lambda memory: memory.peak_bytes)


class _ZeRO:
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
        self.timeline, self.states, self.num_ranks, self.layout, self.on_cpu = (
            timeline,
            states,
            num_ranks,
            layout,
            on_cpu,
        )
        self.ledger = Ledger()
        self.sizes = [state.gradient_bytes for state in states.parameters]
        self.trained = states.num_trained
        self.gradient_bytes = sum(self.sizes)
        self.itemsize = self.gradient_bytes / max(1, self.trained)
        self.is_low = settings.parameter_dtype is not None and self.itemsize < 4
        numel = self.trained + self.trained % 2
        most = layout.bucket_numel or (CPU_BUCKET if on_cpu else CUDA_BUCKET)
        self.bucket = int(max(2, min(most, numel)) * self.itemsize)
        optimizer_numel = sum(state.optimizer_numel for state in states.parameters)
        optimizer = 4 * optimizer_numel if self.is_low else states.optimizer_bytes
        self.optimizer_shard = optimizer / num_ranks
        self.masters_shard = 4 * self.trained / num_ranks
        self.shard = self.gradient_bytes / num_ranks
        self.held: set[int] = set()
        """The parameters whose gradient, as autograd has computed it, exists."""

    def _place(self, place: str, item: Item, num_bytes: float) -> None:
        if place == "device" or (place == "host" and self.on_cpu):
            self.ledger.add(item, num_bytes)
        elif place == "host":
            self.ledger.host_bytes += int(num_bytes)
        else:
            self.ledger.nvme_bytes += int(num_bytes)

    def _activations(self, kind: Kind, size: int) -> None:
        if kind in (Kind.ACTIVATION, Kind.CAST):
            self.ledger.add(Item.ACTIVATIONS, size)

    def _hold(self, number: int) -> None:
        if number not in self.held:
            self.held.add(number)
            self.ledger.add(Item.GRADIENTS, self.sizes[number])

    def _drop(self, number: int) -> None:
        if number in self.held:
            self.held.discard(number)
            self.ledger.add(Item.GRADIENTS, -self.sizes[number])

    def _step_temporaries(self, numel_bytes: float) -> None:
        """Count what Adam allocates on the device while it steps."""
        if self.layout.optimizer_place != "device" and not self.on_cpu:
            return
        states_per_element = self.states.optimizer_bytes / max(1, self.gradient_bytes)
        if states_per_element >= 1:
            each = min(_PIECE, numel_bytes) if self.on_cpu else numel_bytes
            self.ledger.pulse(Item.ACTIVATIONS, (2 if self.on_cpu else 1) * each)


class _Stage1And2(_ZeRO):
    def __init__(self, *args: object, rank: int, **options: object) -> None:
        super().__init__(*args, **options)  # type: ignore[arg-type]
        self.part = largest_part(self.states, self.num_ranks)
        self.first, self.last = self.shard * rank, self.shard * (rank + 1)
        """The bytes of the flattened gradients that this rank owns."""
        starts, start = [], 0
        for size in self.sizes:
            starts.append(start)
            start += size
        self.starts = starts
        self.filled = 0
        self.in_bucket: list[int] = []
        self.has_bucket = False
        self.in_flight: deque[float] = deque()
        self.averaged = 0.0
        self.reduces_late = self.layout.stage == 1 and (self.on_cpu or self.num_ranks == 1)
        """Stage 1 reduces gradients after the backward pass, unless communication overlaps with it."""
        self.late: list[int] = []

    def follow(self) -> RankMemory:
        ledger, states, place = self.ledger, self.states, self.layout.optimizer_place
        ledger.add(Item.PARAMETERS, states.parameter_bytes)
        if self.is_low or (place == "host" and not self.on_cpu):
            self._place(place, Item.OPTIMIZER, self.masters_shard)
        self._place(place, Item.OPTIMIZER, self.optimizer_shard)
        if place == "host":
            self._place(place, Item.GRADIENTS, self.masters_shard)
        ledger.add(Item.ACTIVATIONS, states.buffer_bytes + self.timeline.initial_bytes)
        for kind, size, number in self.timeline.moments:
            self._activations(kind, size)
            if kind is Kind.GRADIENT and size > 0:
                self._hold(number)
            elif kind is Kind.READY:
                self._hold(number)
                self._ready(number)
            elif kind is Kind.OPTIMIZER:
                self._end_backward()
                self._step()
        return ledger.result()

    def _ready(self, number: int) -> None:
        if not self.has_bucket:  # DeepSpeed makes it when the backward pass begins
            self.has_bucket = True
            self.ledger.add(Item.COMMUNICATION, self.bucket * (1 if self.on_cpu else 2))
        if self.reduces_late:
            self.late.append(number)
        else:
            self._put_in_bucket(number)

    def _put_in_bucket(self, number: int) -> None:
        size = self.sizes[number]
        if self.filled + size > self.bucket:
            self._reduce()
        self.in_bucket.append(number)
        self.filled += size
        if self.layout.stage == 2:
            self._drop(number)

    def _reduce(self) -> None:
        own = sum(
            max(0.0, min(self.last, self.starts[number] + self.sizes[number]) - max(self.first, self.starts[number]))
            for number in self.in_bucket
        )
        others = self.filled - own
        for number in self.in_bucket:
            self._drop(number)
        both = self.layout.stage == 2 and own > 0 and others > 0
        if self.on_cpu and self.num_ranks > 1:
            if others:
                while self.in_flight and sum(self.in_flight) + others > _MAX_IN_FLIGHT:
                    self.ledger.add(Item.COMMUNICATION, -int(self.in_flight.popleft()))
                self.in_flight.append(int(others))
                self.ledger.add(Item.COMMUNICATION, int(others))
                if both:
                    self.ledger.pulse(Item.COMMUNICATION, others)
            self.ledger.pulse(Item.COMMUNICATION, own * (self.num_ranks - 1) + (own if both else 0))
        # With offload, each gradient is copied to the host's memory and freed.
        if own and not self.averaged and self.layout.optimizer_place == "device":
            self.averaged = float(self.part)
            self.ledger.add(Item.GRADIENTS, self.averaged)
        self.in_bucket, self.filled = [], 0

    def _end_backward(self) -> None:
        for number in self.late:
            self._put_in_bucket(number)
        self.late = []
        self._reduce()
        if self.has_bucket:
            self.has_bucket = False
            self.ledger.add(Item.COMMUNICATION, -self.bucket * (1 if self.on_cpu else 2))
        while self.in_flight:
            self.ledger.add(Item.COMMUNICATION, -int(self.in_flight.popleft()))

    def _step(self) -> None:
        flat = int(self.masters_shard if self.is_low else self.shard)
        on_device = self.layout.optimizer_place == "device" or self.on_cpu
        if on_device:
            self.ledger.add(Item.GRADIENTS, flat)
        self.ledger.add(Item.GRADIENTS, -int(self.averaged))
        self.averaged = 0.0
        self._step_temporaries(flat)
        if on_device:
            self.ledger.add(Item.GRADIENTS, -flat)
        if self.num_ranks > 1:  # the all-gather of new parameters, which is made in pieces on gloo
            gathered = min(self.gradient_bytes, _MAX_GATHERED) if self.on_cpu else self.gradient_bytes
            self.ledger.pulse(Item.COMMUNICATION, gathered)


class _Stage3(_ZeRO):
    def follow(self) -> RankMemory:
        ledger, layout = self.ledger, self.layout
        states = self.states
        small = [state for state in states.parameters if state.numel < PERSISTENT_NUMEL]
        partitioned = (states.parameter_bytes - sum(state.num_bytes for state in small)) / self.num_ranks
        self._place(layout.parameter_place, Item.PARAMETERS, partitioned)
        ledger.add(Item.PARAMETERS, sum(state.num_bytes * (1 + 1 / self.num_ranks) for state in small))
        if self.is_low or layout.optimizer_place != "device":
            self._place(layout.optimizer_place, Item.OPTIMIZER, self.masters_shard)
        self._place(layout.optimizer_place, Item.OPTIMIZER, self.optimizer_shard)
        self._place("device" if layout.optimizer_place == "device" else "host", Item.GRADIENTS, self.shard)
        ledger.add(Item.COMMUNICATION, self.bucket)
        ledger.add(Item.ACTIVATIONS, states.buffer_bytes + self.timeline.initial_bytes)
        largest = max((state.num_bytes for state in states.parameters if state not in small), default=0)
        gathered = 2 * largest  # a module's parameters, and the buffer into which they are gathered
        ledger.add(Item.COMMUNICATION, gathered)
        filled = 0
        for kind, size, number in self.timeline.moments:
            self._activations(kind, size)
            if kind is Kind.GRADIENT and size > 0:
                self._hold(number)
            elif kind is Kind.READY:
                self._hold(number)
                if filled + self.sizes[number] > self.bucket:
                    self._reduce(filled)
                    filled = 0
                filled += self.sizes[number]
                self._drop(number)
            elif kind is Kind.OPTIMIZER:
                self._reduce(filled)
                filled = 0
                ledger.add(Item.COMMUNICATION, -gathered)
                self._step()
                ledger.add(Item.COMMUNICATION, gathered)
        return ledger.result()

    def _reduce(self, filled: int) -> None:
        flattened, result = filled, filled / self.num_ranks
        arriving = min(ARRIVING_BYTES, filled - result) if self.on_cpu else 0
        self.ledger.pulse(Item.COMMUNICATION, flattened + (result + arriving if self.on_cpu else 0))

    def _step(self) -> None:
        if self.layout.optimizer_place != "device" and not self.on_cpu:
            return
        shard = self.masters_shard if self.is_low else self.shard
        group = min(shard, self.bucket * (4 / self.itemsize if self.is_low else 1)) if self.on_cpu else shard
        self.ledger.add(Item.GRADIENTS, group)
        self._step_temporaries(group)
        self.ledger.add(Item.GRADIENTS, -int(group))
