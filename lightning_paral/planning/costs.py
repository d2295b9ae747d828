"""What a strategy costs on a rank, by engine: memory at the peak, and bytes on the wire.

A step of one process gives the moments with the most memory. Each engine adds its shares of the model states, and
bounds for what it holds besides: unsharded units, buckets, and copies for communication. The shares are those of
Rajbhandari et al., "ZeRO", arXiv:1910.02054, figure 1; the bounds are those of FSDP2 of torch 2.11 to 2.13, DeepSpeed
0.19, and this package's collectives on gloo. An all-reduce of n bytes sends 2 n (N-1)/N, an all-gather or
reduce-scatter n (N-1)/N (section 7).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lightning_paral.comm.reduce_scatter import ARRIVING_BYTES
from lightning_paral.planning.fake import StepSettings
from lightning_paral.planning.layout import Layout, Place
from lightning_paral.planning.trace import ROOT, ModelStates, ParameterState, PlannedUnit, Point, Step

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
    moments: tuple[Memory, ...]
    """What the device needs at the moments that may be the peak: in a step, or while the module is built."""
    host_bytes: int
    """In host memory, if the device is not the CPU."""
    nvme_bytes: int
    wire_bytes: int
    """Bytes that the rank sends in an optimizer step."""

    @property
    def memory(self) -> Memory:
        """On the device, at the moment at which it needs the most."""
        most: Memory = max(self.moments, key=lambda each: each.total)
        return Memory(*map(round, most))

    @property
    def peak_bytes(self) -> int:
        """The most that the device needs."""
        return self.memory.total


@dataclass(frozen=True, kw_only=True)
class Case:
    """What the costs of a layout depend on."""

    layout: Layout
    step: Step
    """With the batch of one rank. For a layout that recomputes, with recomputation."""
    states: ModelStates
    """Unsharded."""
    num_ranks: int
    settings: StepSettings
    on_cpu: bool
    """Whether the device is the CPU, so that offloading to host memory saves nothing, and gloo communicates."""

    def is_on_device(self, place: Place) -> bool:
        """Return whether what is at this place takes memory of the device."""
        return place == "device" or (place == "host" and self.on_cpu)


@dataclass(frozen=True, kw_only=True)
class _Costs:
    """A row of the table. Amounts are bytes."""

    shares: Sequence[tuple[str, Place, float]]
    """What the rank keeps: the field of `Memory`, where, and how much."""
    during: Callable[[Point], Memory]
    """What is added to the shares at a point of the forward or the backward pass."""
    afterwards: Sequence[Memory]
    """What is added to the shares after the backward pass: in communication, and in the optimizer."""
    wire_bytes: float
    """What the rank sends in a step, with more than one rank."""


def estimate(case: Case) -> Estimate:
    """Return the costs of a layout."""
    rows = {"ddp": _replicas, "fsdp": _fsdp, "pipeline": _pipeline, "zero": _zero3}
    costs = (_zero12 if case.layout.stage in (1, 2) else rows[case.layout.engine])(case)
    kept = {"activations": float(case.states.buffer_bytes + case.step.batch_bytes)}
    away = {"host": 0.0, "nvme": 0.0}
    for state, place, num_bytes in costs.shares:
        held, name = (kept, state) if case.is_on_device(place) else (away, place)
        held[name] = held.get(name, 0.0) + num_bytes
    added = (*map(costs.during, case.step.points), *costs.afterwards)
    moments = [Memory(*map(sum, zip(Memory(**kept), each, strict=True))) for each in added]
    if case.on_cpu:  # the module is built in full first
        moments.append(Memory(parameters=case.states.early_bytes))
    return Estimate(
        layout=case.layout,
        moments=tuple(moments),
        host_bytes=round(away["host"]),
        nvme_bytes=round(away["nvme"]),
        wire_bytes=round(costs.wire_bytes) if case.num_ranks > 1 else 0,
    )


def _replicas(case: Case) -> _Costs:
    """Each rank has a full replica. DDP keeps buckets as large as all gradients."""
    states, ranks = case.states, case.num_ranks
    return _Costs(
        shares=[
            ("parameters", "device", states.parameter_bytes),
            ("optimizer", "device", states.optimizer_bytes),
            ("communication", "device", states.gradient_bytes),
        ],
        during=lambda point: Memory(gradients=point.gradients, activations=point.used),
        afterwards=[Memory(gradients=states.gradient_bytes, activations=case.step.temporary_bytes)],
        wire_bytes=2 * states.gradient_bytes * (ranks - 1) / ranks / case.layout.period,
    )


def _fsdp(case: Case) -> _Costs:
    """Shards of all states; the root is unsharded for the whole forward and backward pass, the units in turn."""
    layout, states, accumulate = case.layout, case.states, case.settings.accumulate
    tensor, replicas, place = layout.tensor_ranks(case.num_ranks), layout.replicas, layout.parameter_place
    shards, is_mixed = case.num_ranks // replicas // tensor, case.settings.is_mixed

    def shard(state: ParameterState) -> float:
        """Return the elements of the largest shard: FSDP2 divides the first dimension."""
        rows = state.shape[0] if state.shape else 1
        largest = -(-rows // shards) * state.numel / max(1, rows)
        return largest / (tensor if len(state.shape) > 1 and state.numel >= _MIN_SPLIT_NUMEL else 1)

    def unsharded(unit: PlannedUnit) -> tuple[float, float, float]:
        """Return the bytes of its parameters, its gradients, and the input of their reduce-scatter, with padding."""
        parts = [(shard(state) * shards, state) for state in map(states.parameters.__getitem__, unit.parameters)]
        parameters = sum(numel * (2 if is_mixed else state.dtype.itemsize) for numel, state in parts)
        gradients = sum(numel * (2 if is_mixed else state.dtype.itemsize) for numel, state in parts if state.is_trained)
        return parameters, gradients, sum(numel * state.dtype.itemsize for numel, state in parts if state.is_trained)

    *inner, (root, root_gradients, root_reduced) = [unsharded(unit) for unit in case.step.units]
    sizes = [size for size, _, _ in inner]
    # The buffer of the last all-gather is kept until the next one.
    kept = root + (0 if layout.reshards else sum(sizes)) + max(sizes, default=0) * (shards > 1)
    gradients = sum(shard(each) * each.dtype.itemsize for each in states.parameters if each.is_trained)
    optimizer = sum(shard(each) / max(1, each.numel) * each.optimizer_bytes for each in states.parameters)

    def during(point: Point) -> Memory:
        size, unit_gradients, reduced = inner[point.unit] if point.unit != ROOT else (0.0, 0.0, 0.0)
        before = 0.0 if case.on_cpu else reduced  # on CUDA, the input of a reduce-scatter is kept until the next one
        if point.in_backward and point.reduces:  # what it needs takes the place of the parameters
            size = max(size, reduced + (min(ARRIVING_BYTES, reduced) if case.on_cpu else before))
        elif point.in_backward:
            size, unit_gradients = size + before, 0.0
        done = point.gradients / max(1, states.gradient_bytes) * case.is_on_device(place)
        return Memory(
            gradients=gradients * done + (root_gradients + unit_gradients) * point.in_backward,
            activations=point.activations + (0 if is_mixed else point.casts),
            communication=kept + size,
        )

    on_device = gradients * case.is_on_device(place)
    temporary = case.is_on_device(place) * case.step.temporary_bytes / shards / tensor
    gathered = states.parameter_bytes / (1 + is_mixed) * (1 + layout.reshards)
    sent = (gathered + states.gradient_bytes) / tensor * (shards - 1) / shards * accumulate
    sent += 2 * states.gradient_bytes / tensor / shards * (replicas - 1) / replicas
    # Two sums of activations in the forward pass of each unit, and two in its backward pass.
    sent += 4 * sum(unit.output_bytes for unit in case.step.units) * accumulate * 2 * (tensor - 1) / tensor
    return _Costs(
        shares=[
            ("parameters", place, sum(shard(each) * each.dtype.itemsize for each in states.parameters)),
            ("optimizer", place, optimizer),
            ("gradients", place, 0.0 if case.is_on_device(place) else gradients),
        ],
        during=during,
        afterwards=[
            Memory(gradients=on_device + root_gradients, communication=root_reduced),
            Memory(gradients=on_device, activations=temporary),
        ],
        wire_bytes=sent,
    )


class _ZeRO:
    """What the stages have in common: the optimizer works on shards, in fp32 if parameters have 16 bits."""

    def __init__(self, case: Case) -> None:
        states, place, ranks = case.states, case.layout.optimizer_place, case.num_ranks
        dtype = case.settings.parameter_dtype
        self.is_low = dtype is not None and dtype.itemsize < 4
        self.steps_on_device = case.is_on_device(place)
        part = (_CPU_BUCKET if case.on_cpu else _CUDA_BUCKET) / max(1, states.num_trained)
        self.bucket = states.gradient_bytes * min(1.0, part)
        self.is_filled = states.gradient_bytes > self.bucket
        """Whether gradients are reduced while the backward pass runs, because they take more than one bucket."""
        self.masters = 4 * states.num_trained / ranks
        self.shares: list[tuple[str, Place, float]] = [
            ("optimizer", place, states.optimizer_bytes * (2 if self.is_low else 1) / ranks),
            ("optimizer", place, self.masters * (self.is_low or not self.steps_on_device)),
        ]
        self.shard = self.masters if self.is_low else states.gradient_bytes / ranks
        self._allocates = self.steps_on_device and states.optimizer_bytes >= states.gradient_bytes
        self._on_cpu = case.on_cpu

    def temporaries(self, shard: float) -> float:
        """Return what Adam allocates on the device while it updates a shard of this size; SGD allocates nothing."""
        return self._allocates * (2 * min(_ADAM_PIECE, shard) if self._on_cpu else shard)


def _zero12(case: Case) -> _Costs:
    """Full parameters; gradients go through a bucket to their owners, at stage 2 while the backward pass runs."""
    zero, states, ranks, is_first = _ZeRO(case), case.states, case.num_ranks, case.layout.stage == 1
    is_late, on_device = is_first and (case.on_cpu or ranks == 1), case.layout.optimizer_place == "device"
    # Reduced gradients: all of each parameter of which the rank owns elements.
    shared = 2 * states.largest_gradient_bytes * (ranks > 1)
    reduced = on_device * min(states.gradient_bytes, states.gradient_bytes / ranks + shared)
    held = states.gradient_bytes if is_late else zero.bucket if is_first else states.largest_gradient_bytes
    buckets, reducing, others = zero.bucket * (1 if case.on_cpu else 2), 0.0, 1 - 1 / ranks
    if case.on_cpu and ranks > 1:  # what arrives, and what was sent
        reducing = zero.bucket * (others if is_first else 1)
        reducing += others * min(states.gradient_bytes, max(zero.bucket, _IN_FLIGHT))
    has_reduced, is_part = zero.is_filled and not is_late, case.settings.accumulate > 1
    # Of earlier micro-batches: their sum is beside the reduced gradients of one, or in the gradients.
    earlier = (reduced + on_device * states.gradient_bytes / ranks) * (is_part and not is_late)

    def during(point: Point) -> Memory:
        gradients = min(held, point.gradients) * (point.in_backward or (is_part and is_late))
        # At stage 1, gradients on gloo move into the bucket at the end.
        waiting = max(0, buckets - gradients * is_late) + reducing * has_reduced
        return Memory(
            gradients=gradients + max(earlier, reduced * (has_reduced and point.in_backward)),
            activations=point.used,
            communication=waiting * point.in_backward,
        )

    flat = zero.shard * zero.steps_on_device
    gathered = min(states.gradient_bytes, _GATHERED) if case.on_cpu else states.gradient_bytes
    # DeepSpeed reduces gradients by an all-reduce on NCCL, this package directly to their owners on gloo.
    reductions = (1 if is_first else case.settings.accumulate) * (1 if case.on_cpu else 2)
    return _Costs(
        shares=[
            *zero.shares,
            ("parameters", "device", states.parameter_bytes),
            ("gradients", "host", zero.masters * (case.layout.optimizer_place == "host")),
        ],
        during=during,
        afterwards=[
            Memory(gradients=max(0, held - zero.bucket), communication=buckets + reducing),
            Memory(gradients=flat + reduced, activations=zero.temporaries(flat)),
            Memory(gradients=flat, communication=gathered * (ranks > 1)),
        ],
        wire_bytes=states.gradient_bytes * (reductions + 1) * others,
    )


def _zero3(case: Case) -> _Costs:
    """Shards of all states; parameters of a module are gathered while it runs, small ones are never partitioned."""
    zero, layout, states, ranks = _ZeRO(case), case.layout, case.states, case.num_ranks
    small = sum(each.num_bytes for each in states.parameters if each.numel < _PERSISTENT_NUMEL)
    largest = max((each.num_bytes for each in states.parameters if each.numel >= _PERSISTENT_NUMEL), default=0)
    gathered = 2 * largest  # a module's parameters, and the buffer into which they are gathered
    own = zero.bucket / ranks
    reducing = zero.bucket + (own + min(ARRIVING_BYTES, zero.bucket - own)) * case.on_cpu
    group = min(zero.shard, zero.bucket * (1 + zero.is_low)) if case.on_cpu else zero.shard
    group *= zero.steps_on_device
    return _Costs(
        shares=[
            *zero.shares,
            ("parameters", layout.parameter_place, (states.parameter_bytes - small) / ranks),
            ("parameters", "device", small * (1 + 1 / ranks)),
            ("gradients", "device" if layout.optimizer_place == "device" else "host", states.gradient_bytes / ranks),
            ("communication", "device", zero.bucket),
        ],
        during=lambda point: Memory(
            gradients=states.largest_gradient_bytes * point.in_backward,
            activations=point.used,
            communication=gathered + reducing * (zero.is_filled and point.in_backward),
        ),
        afterwards=[
            Memory(communication=gathered + reducing),
            Memory(gradients=group, activations=zero.temporaries(group)),
        ],
        wire_bytes=(2 * states.parameter_bytes + states.gradient_bytes)
        * ((ranks - 1) / ranks * case.settings.accumulate),
    )


def _pipeline(case: Case) -> _Costs:
    """Each stage has consecutive units, and the activations of the micro-batches that are under way."""
    states, units, stages = case.states, case.step.units, case.layout.num_stages(case.num_ranks)
    tensor = case.layout.tensor_ranks(case.num_ranks)
    *inner, root = [sum(states.parameters[number].num_bytes for number in unit.parameters) for unit in units]
    # The first and the last stage also have what is before and after the units; all of the root is an upper bound.
    largest = -(-len(inner) // stages) * max(inner, default=0) + root
    share, replicas = min(1.0, largest / max(1, states.parameter_bytes)) / tensor, case.num_ranks // stages // tensor
    micro_batches = case.layout.micro_batches or 4 * stages
    per_stage = case.layout.parts_per_stage if stages > 1 else 1
    ahead = stages if per_stage == 1 else 2 * stages - 1 + (per_stage - 1) * stages  # passes before the first backward
    under_way = min(ahead, micro_batches * per_stage) / per_stage / micro_batches / stages  # of all activations
    # Outside of the units, the activations of one micro-batch: of the loss, for example.
    at_root = max(under_way, 1 / micro_batches)
    sent = 2.0 * per_stage * max((unit.output_bytes for unit in units), default=0) * case.settings.accumulate
    # Of tensor parallelism, two sums of activations in the forward pass of each unit, and two in its backward pass.
    sent += 8 * sum(unit.output_bytes for unit in units) / stages * case.settings.accumulate * (tensor - 1) / tensor
    return _Costs(
        shares=[
            # During a step, FSDP2, which holds the parts of tensor ranks, has a copy of them.
            ("parameters", "device", share * states.parameter_bytes * (1 + (tensor > 1))),
            ("gradients", "device", share * states.gradient_bytes),
            ("optimizer", "device", share * states.optimizer_bytes),
            # Gradients of the micro-batches are added up beside those of the parameters.
            ("communication", "device", share * states.gradient_bytes),
        ],
        during=lambda point: Memory(activations=point.used * (at_root if point.unit == ROOT else under_way)),
        afterwards=[Memory(activations=share * case.step.temporary_bytes)],
        wire_bytes=sent + 2 * states.gradient_bytes / stages / tensor * (replicas - 1) / replicas,
    )
