"""What a strategy costs on a rank, by engine: memory at the peak, and bytes on the wire.

A step of one process gives the moments with the most memory. Each engine adds shares of the model states, and what it
holds besides: unsharded units, buckets, and copies for communication. The shares are those of Rajbhandari et al.,
"ZeRO", arXiv:1910.02054, figure 1; the rest follows FSDP2 of torch 2.11 to 2.13, DeepSpeed 0.19, and this package's
collectives on gloo.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

from lightning_paral.comm.reduce_scatter import ARRIVING_BYTES
from lightning_paral.planning.fake import StepSettings
from lightning_paral.planning.layout import Layout, Place
from lightning_paral.planning.states import ModelStates, ParameterState
from lightning_paral.planning.trace import ROOT, PlannedUnit, Step

_CPU_BUCKET, _CUDA_BUCKET = 6_553_600, 50_000_000
"""Elements of a bucket of ZeRO."""
_IN_FLIGHT = 50 * 2**20
"""Bytes of gradients that a rank on gloo has sent and still holds at stages 1 and 2, unless one bucket is larger."""
_GATHERED = 25 * 2**20
"""Bytes of a piece of an all-gather on gloo at stages 1 and 2."""
_ADAM_PIECE = 4 * 2**20
"""Bytes of each of the two temporary tensors of DeepSpeed's Adam on CPU, which steps in pieces."""
_PERSISTENT_NUMEL = 100_000
"""Stage 3 does not partition parameters with fewer elements."""
_MIN_SPLIT_NUMEL = 4096
"""Tensor parallelism leaves layers with fewer elements whole."""


class Memory(NamedTuple):
    """Bytes on a device at one moment, by what they are for."""

    parameters: float = 0
    gradients: float = 0
    optimizer: float = 0
    activations: float = 0
    """Also buffers of the module, the batch, and temporaries of the optimizer."""
    communication: float = 0
    """Unsharded parameters, and buckets."""

    @property
    def total(self) -> int:
        """All bytes."""
        return round(sum(self))


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """The costs of a layout on the rank that needs the most."""

    layout: Layout
    memory: Memory
    """On the device, at the moment at which it needs the most: in a step, or while the module is built."""
    host_bytes: int
    """In host memory, if the device is not the CPU."""
    nvme_bytes: int
    wire_bytes: int
    """Bytes that the rank sends in an optimizer step."""

    @property
    def peak_bytes(self) -> int:
        """The most that the device needs."""
        return self.memory.total


def estimate(
    layout: Layout, step: Step, states: ModelStates, num_ranks: int, settings: StepSettings, *, on_cpu: bool
) -> Estimate:
    """Return the costs of a layout.

    Args:
        layout: the strategy.
        step: a step with the batch of one rank; for DP, with that of the loader. For a layout that recomputes, with
            activation checkpointing.
        states: the states of the module, unsharded.
        num_ranks: the number of ranks; for DP, of devices.
        settings: the Trainer's settings.
        on_cpu: whether the device is the CPU, so that offloading to host memory saves nothing, and gloo communicates.
    """
    costs = costs_of(layout, step, states, num_ranks, settings, on_cpu=on_cpu)
    memory = max(costs.moments(), key=lambda each: each.total)
    return Estimate(
        layout=layout,
        memory=Memory(*map(round, memory)),
        host_bytes=round(costs.elsewhere["host"]),
        nvme_bytes=round(costs.elsewhere["nvme"]),
        wire_bytes=round(costs.wire_bytes()) if num_ranks > 1 else 0,
    )


def costs_of(
    layout: Layout, step: Step, states: ModelStates, num_ranks: int, settings: StepSettings, *, on_cpu: bool
) -> "Costs":
    """Return the costs of the engine of a layout; the arguments are those of `estimate`."""
    engines: dict[str, type[Costs]] = {"dp": _DP, "ddp": _DDP, "fsdp": _FSDP, "pipeline": _Pipeline, "zero": _ZeRO3}
    engine = _ZeRO12 if layout.stage in (1, 2) else engines[layout.engine]
    return engine(layout, step, states, num_ranks, settings, on_cpu)


class Costs(ABC):
    """What all engines have in common. Names of amounts are those of bytes."""

    def __init__(
        self, layout: Layout, step: Step, states: ModelStates, num_ranks: int, settings: StepSettings, on_cpu: bool
    ) -> None:
        self.layout, self.step, self.states, self.settings = layout, step, states, settings
        self.num_ranks, self.on_cpu = num_ranks, on_cpu
        self.parameters, self.gradients = states.parameter_bytes, states.gradient_bytes
        self.sizes = [state.gradient_bytes for state in states.parameters]
        self.buffers = states.buffer_bytes + step.batch_bytes
        self.elsewhere: dict[Place, float] = {"host": 0.0, "nvme": 0.0}

    @abstractmethod
    def moments(self) -> Iterator[Memory]:
        """Yield the moments that may be the peak."""

    @abstractmethod
    def wire_bytes(self) -> float:
        """Return the bytes that a rank sends in a step, with more than one rank.

        An all-reduce of n bytes sends 2 n (N-1)/N, an all-gather or reduce-scatter n (N-1)/N (arXiv:1910.02054,
        section 7).
        """

    def place(self, place: Place, num_bytes: float) -> float:
        """Return the bytes of a state that are on the device, and count the others where they are."""
        if place == "device" or (place == "host" and self.on_cpu):
            return num_bytes
        self.elsewhere[place] += num_bytes
        return 0.0


class _DDP(Costs):
    """Each rank has a full replica; the reducer keeps buckets as large as all gradients."""

    def moments(self) -> Iterator[Memory]:
        states = Memory(self.parameters, 0, self.states.optimizer_bytes, self.buffers, self.gradients)
        for point in self.step.points:
            yield _plus(states, gradients=point.gradients, activations=point.activations + point.casts)
        yield _plus(states, gradients=self.gradients, activations=self.step.temporary_bytes)

    def wire_bytes(self) -> float:
        return 2 * self.gradients * (self.num_ranks - 1) / self.num_ranks


class _DP(Costs):
    """The devices of one process divide the batch; the first has the parameters, the others get copies of them."""

    def moments(self) -> Iterator[Memory]:
        others = self.num_ranks - 1
        are_one = self.on_cpu  # the replicas are in the same memory
        replicas = others * (self.parameters + self.states.buffer_bytes) if are_one else min(1, others) * self.gradients
        copies = self.step.batch_bytes if are_one and others else 0
        states = Memory(self.parameters, 0, self.states.optimizer_bytes, self.buffers + copies, replicas)
        for point in self.step.points:
            used = (point.activations + point.casts) / (1 if are_one else self.num_ranks)
            # Gradients of the replicas are kept until all are complete.
            gradients = point.gradients * (self.num_ranks if are_one and point.in_backward else 1)
            yield _plus(states, gradients=gradients, activations=used)
        yield _plus(states, gradients=self.gradients, activations=self.step.temporary_bytes)

    def wire_bytes(self) -> float:
        return 0.0


class _Unsharded(NamedTuple):
    """What a unit takes while it is unsharded, with padding."""

    parameters: float
    gradients: float
    reduced: float
    """The input of the reduce-scatter, in the dtype of the shards."""


class _FSDP(Costs):
    """Shards of all states; the root is unsharded for the whole forward and backward pass, the units in turn."""

    def __init__(
        self, layout: Layout, step: Step, states: ModelStates, num_ranks: int, settings: StepSettings, on_cpu: bool
    ) -> None:
        super().__init__(layout, step, states, num_ranks, settings, on_cpu)
        self.tensor = layout.tensor_ranks(num_ranks)
        self.shards = num_ranks // layout.replicas // self.tensor
        self.numels = [self._shard_numel(state) for state in states.parameters]

    def moments(self) -> Iterator[Memory]:
        parameters = self._on_rank([state.num_bytes for state in self.states.parameters])
        optimizer = self._on_rank([state.optimizer_bytes for state in self.states.parameters])
        gradients = self._on_rank(self.sizes)
        if self.on_cpu and self.shards > 1:  # what is built before `configure_model` is sharded one by one
            yield Memory(parameters=self.states.early_bytes * (1 - 1 / self.shards) + parameters)
        states = Memory(parameters, 0, optimizer, self.buffers, 0)
        *inner, root = [self._unsharded(unit) for unit in self.step.units]
        kept = 0 if self.layout.reshards else sum(unit.parameters for unit in inner)
        last = 0.0
        for point in self.step.points:
            unsharded = root.parameters + kept
            held = root.gradients if point.in_backward else 0.0
            if point.unit == ROOT:  # the buffer of the last all-gather is kept until the next one
                unsharded += last
            else:
                unit, last = inner[point.unit], inner[point.unit].parameters * (self.shards > 1)
                unsharded += last
                if point.in_backward:  # what its reduce-scatter needs takes the place of its parameters
                    arriving = min(ARRIVING_BYTES, unit.reduced * (1 - 1 / self.shards))
                    before = unit.reduced  # on CUDA, the input of the reduce-scatter before is kept until the next one
                    unsharded += max(unit.parameters, unit.reduced + (arriving if self.on_cpu else before))
                    held += unit.gradients
                else:
                    unsharded += unit.parameters
            yield _plus(
                states,
                gradients=gradients * point.gradients / max(1, self.gradients) + held,
                activations=point.activations + (0 if self.settings.is_mixed else point.casts),
                communication=unsharded,
            )
        yield _plus(states, gradients=gradients + root.gradients, communication=root.reduced)
        is_offloaded = self.layout.parameter_place == "host" and not self.on_cpu
        share = sum(self.numels) / max(1, self.states.num_params) * (not is_offloaded)
        yield _plus(states, gradients=gradients, activations=self.step.temporary_bytes * share)

    def _on_rank(self, sizes: Sequence[int]) -> float:
        """Return the bytes of the shards of these sizes that are on the device."""
        parts = zip(sizes, self.numels, self.states.parameters, strict=True)
        total = sum(size * numel / max(1, state.numel) for size, numel, state in parts)
        return self.place(self.layout.parameter_place, total)

    def _shard_numel(self, state: ParameterState) -> float:
        """Return the elements of the largest shard: FSDP2 divides the first dimension."""
        if not state.shape:
            return 1
        is_split = self.tensor > 1 and state.numel >= _MIN_SPLIT_NUMEL and len(state.shape) > 1
        largest = -(-state.shape[0] // self.shards) * (state.numel // max(1, state.shape[0]))
        return largest / self.tensor if is_split else largest

    def _unsharded(self, unit: PlannedUnit) -> _Unsharded:
        parameters = gradients = reduced = 0.0
        for number in unit.parameters:
            state, numel = self.states.parameters[number], self.numels[number] * self.shards
            itemsize = 2 if self.settings.is_mixed else state.dtype.itemsize
            parameters += numel * itemsize
            gradients += numel * itemsize * state.is_trained
            reduced += numel * state.dtype.itemsize * state.is_trained
        return _Unsharded(parameters, gradients, reduced)

    def wire_bytes(self) -> float:
        shards, replicas, tensor = self.shards, self.layout.replicas, self.tensor
        gathered = self.parameters / (2 if self.settings.is_mixed else 1) * (2 if self.layout.reshards else 1)
        sent = (gathered + self.gradients) / tensor * (shards - 1) / shards * self.settings.accumulate
        sent += 2 * self.gradients / tensor / shards * (replicas - 1) / replicas
        # Two sums of activations in the forward pass of each unit, and two in its backward pass.
        outputs = sum(unit.output_bytes for unit in self.step.units) * self.settings.accumulate
        return sent + 4 * outputs * 2 * (tensor - 1) / tensor


class _ZeRO(Costs):
    """What the stages have in common: the optimizer works on shards, in fp32 if parameters have 16 bits."""

    def __init__(
        self, layout: Layout, step: Step, states: ModelStates, num_ranks: int, settings: StepSettings, on_cpu: bool
    ) -> None:
        super().__init__(layout, step, states, num_ranks, settings, on_cpu)
        itemsize = self.gradients / max(1, states.num_trained)
        self.is_low = settings.parameter_dtype is not None and itemsize < 4
        most = _CPU_BUCKET if on_cpu else _CUDA_BUCKET
        self.bucket = min(most, states.num_trained) * itemsize
        numel = sum(state.optimizer_numel for state in states.parameters)
        self.optimizer = (4 * numel if self.is_low else states.optimizer_bytes) / num_ranks
        self.masters = 4 * states.num_trained / num_ranks
        self.shard = self.gradients / num_ranks
        self.steps_on_device = layout.optimizer_place == "device" or on_cpu

    def _temporaries(self, shard: float) -> float:
        """Return what Adam allocates on the device while it updates a shard of this size; SGD allocates nothing."""
        if not self.steps_on_device or self.states.optimizer_bytes < self.gradients:
            return 0.0
        return 2 * min(_ADAM_PIECE, shard) if self.on_cpu else shard


class _ZeRO12(_ZeRO):
    """Full parameters; gradients go through a bucket to their owners, at stage 2 while the backward pass runs."""

    def moments(self) -> Iterator[Memory]:
        place, late = self.layout.optimizer_place, self.layout.stage == 1 and (self.on_cpu or self.num_ranks == 1)
        optimizer = self.place(place, self.optimizer)
        if self.is_low or (place == "host" and not self.on_cpu):
            optimizer += self.place(place, self.masters)
        on_host = self.place("host", self.masters) if place == "host" else 0.0  # gradients
        states = Memory(self.parameters, on_host, optimizer, self.buffers, 0)
        buckets = self.bucket * (1 if self.on_cpu else 2)
        held = filled = averaged = 0.0
        has_buckets = False
        for point in self.step.points:
            used = point.activations + point.casts
            if filled and not point.in_backward:  # another micro-batch follows
                yield from self._reducing(states, held + averaged, used, filled, buckets)
                held, filled, averaged = 0.0, 0.0, self._part()
            has_buckets = has_buckets or point.in_backward
            yield _plus(
                states,
                gradients=held + averaged,
                activations=used,
                communication=buckets if has_buckets else 0,
            )
            if point.ready == -1:
                continue
            size = self.sizes[point.ready]
            if late:
                held = min(self.gradients, held + size)
                continue
            if filled + size > self.bucket:
                yield from self._reducing(states, held + averaged, used, filled, buckets)
                held, filled, averaged = 0.0, 0.0, self._part()
            filled += size
            yield _plus(states, gradients=held + size + averaged, activations=used, communication=buckets)
            held += size if self.layout.stage == 1 else 0
        last = min(self.gradients, self.bucket) if late else filled
        yield from self._reducing(states, held + averaged, 0, last, buckets)
        flat = (self.masters if self.is_low else self.shard) if self.steps_on_device else 0
        stepping = _plus(states, gradients=flat, activations=self._temporaries(self.masters if self.is_low else flat))
        yield _plus(stepping, gradients=self._part())
        if self.num_ranks > 1:  # the all-gather of new parameters
            gathered = min(self.gradients, _GATHERED) if self.on_cpu else self.gradients
            yield _plus(states, gradients=flat, communication=gathered)

    def _reducing(
        self, states: Memory, gradients: float, activations: float, filled: float, buckets: float
    ) -> Iterator[Memory]:
        """Yield the moments at which a bucket is reduced to the owners of its gradients."""
        own, others = filled / self.num_ranks, filled * (1 - 1 / self.num_ranks)
        sent = received = 0.0
        if self.on_cpu and self.num_ranks > 1:
            sent = min(self.gradients * (1 - 1 / self.num_ranks), max(others, _IN_FLIGHT))
            received = own * (self.num_ranks - 1) + (own if self.layout.stage == 2 else 0)
        yield _plus(states, gradients=gradients, activations=activations, communication=buckets + sent + received)
        yield _plus(states, gradients=self._part(), activations=activations, communication=buckets + sent)

    def _part(self) -> float:
        """Return the bytes of reduced gradients: all of each parameter of which the rank owns elements."""
        if self.layout.optimizer_place != "device":
            return 0.0
        ends = list(accumulate(self.sizes, initial=0))
        part = ends[-1] / self.num_ranks
        return max(
            sum(last - first for first, last in pairwise(ends) if first < part * (rank + 1) and last > part * rank)
            for rank in {0, self.num_ranks - 1}
        )

    def wire_bytes(self) -> float:
        # DeepSpeed reduces gradients by an all-reduce on NCCL, this package directly to their owners on gloo.
        reductions = (self.settings.accumulate if self.layout.stage == 2 else 1) * (1 if self.on_cpu else 2)
        return (self.gradients * reductions + self.gradients) * (self.num_ranks - 1) / self.num_ranks


class _ZeRO3(_ZeRO):
    """Shards of all states; parameters of a module are gathered while it runs, small ones are never partitioned."""

    def moments(self) -> Iterator[Memory]:
        layout, states = self.layout, self.states
        small = [state for state in states.parameters if state.numel < _PERSISTENT_NUMEL]
        persistent = sum(state.num_bytes for state in small)
        parameters = self.place(layout.parameter_place, (self.parameters - persistent) / self.num_ranks)
        parameters += persistent * (1 + 1 / self.num_ranks)
        optimizer = self.place(layout.optimizer_place, self.optimizer)
        if self.is_low or layout.optimizer_place != "device":
            optimizer += self.place(layout.optimizer_place, self.masters)
        gradients = self.place("device" if layout.optimizer_place == "device" else "host", self.shard)
        largest = max((state.num_bytes for state in states.parameters if state.numel >= _PERSISTENT_NUMEL), default=0)
        gathered = 2 * largest  # a module's parameters, and the buffer into which they are gathered
        base = Memory(parameters, gradients, optimizer, self.buffers, self.bucket)
        yield from self._building(base)
        filled = 0.0
        for point in self.step.points:
            used = point.activations + point.casts
            size = self.sizes[point.ready] if point.ready != -1 else 0
            yield _plus(base, gradients=size, activations=used, communication=gathered)
            if filled + size > self.bucket or (filled and not point.in_backward):
                yield _plus(base, gradients=size, activations=used, communication=gathered + self._reducing(filled))
                filled = 0.0
            filled += size
        yield _plus(base, communication=gathered + self._reducing(filled))
        if self.steps_on_device:
            shard = self.masters if self.is_low else self.shard
            group = min(shard, self.bucket * (2 if self.is_low else 1)) if self.on_cpu else shard
            yield _plus(base, gradients=group, activations=self._temporaries(group))

    def _reducing(self, filled: float) -> float:
        result = filled / self.num_ranks
        return filled + (result + min(ARRIVING_BYTES, filled - result) if self.on_cpu else 0)

    def _building(self, base: Memory) -> Iterator[Memory]:
        """Yield the peak of construction, which copies the shards into one tensor, and allocates one for gradients."""
        if self.on_cpu and self.layout.parameter_place != "nvme":
            shard, early = self.parameters / self.num_ranks, self.states.early_bytes
            yield Memory(parameters=2 * shard, gradients=shard)
            yield Memory(parameters=early + max(0.0, shard - early / self.num_ranks))

    def wire_bytes(self) -> float:
        share = (self.num_ranks - 1) / self.num_ranks
        return (2 * self.parameters + self.gradients) * share * self.settings.accumulate


class _Pipeline(Costs):
    """Each stage has consecutive units, and the activations of the micro-batches that are under way."""

    def moments(self) -> Iterator[Memory]:
        stages = self._stages()
        parameters, units = self.states.parameters, self.step.units
        *inner, root = [sum(parameters[number].num_bytes for number in unit.parameters) for unit in units]
        # The first and the last stage also have what is before and after the units; all of the root is an upper bound.
        largest = -(-len(inner) // stages) * max(inner, default=0) + root
        share = min(1.0, largest / max(1, self.parameters))
        micro_batches = self.layout.micro_batches or 4 * stages
        under_way = min(stages, micro_batches) / micro_batches / stages  # of the activations of all stages
        # Gradients of the micro-batches are added up beside those of the parameters.
        added = share * self.gradients
        states = Memory(share * self.parameters, 0, share * self.states.optimizer_bytes, self.buffers, added)
        for point in self.step.points:
            # Outside of the units, of one micro-batch: the loss, for example.
            part = under_way if point.unit != ROOT else max(under_way, 1 / micro_batches)
            used = (point.activations + point.casts) * part
            yield _plus(states, gradients=share * self.gradients, activations=used)
        yield _plus(states, gradients=share * self.gradients, activations=share * self.step.temporary_bytes)

    def _stages(self) -> int:
        return self.layout.stages or self.num_ranks

    def wire_bytes(self) -> float:
        sent = max((unit.output_bytes for unit in self.step.units), default=0) * self.settings.accumulate
        replicas = self.num_ranks // self._stages()
        return 2 * sent + 2 * self.gradients / self._stages() * (replicas - 1) / replicas


def _plus(memory: Memory, **more: float) -> Memory:
    return memory._replace(**{name: getattr(memory, name) + value for name, value in more.items()})
