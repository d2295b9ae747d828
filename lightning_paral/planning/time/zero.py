"""The time of a step under ZeRO: gradients are reduced bucket by bucket, and updated parameters gathered.

It follows DeepSpeed 0.19 with the settings of this package: on CUDA, stages 1 and 2 all-reduce a bucket while the
backward pass computes the next; on CPU, they send the parts of a bucket to their owners. Stage 3 gathers parameters as
their modules are used.
"""

from collections.abc import Iterable

from lightning_paral.planning.layout import Layout
from lightning_paral.planning.memory.zero import CPU_BUCKET, CUDA_BUCKET, PERSISTENT_NUMEL
from lightning_paral.planning.states import ModelStates
from lightning_paral.planning.time.collectives import Collectives
from lightning_paral.planning.time.streams import Streams
from lightning_paral.planning.timeline import Kind, Moment, PlannedUnit


class ZeROStep:
    """Runs micro-batches on two streams.

    Args:
        states: the states of the module.
        units: what stage 3 gathers together, the root last.
        collectives: the costs of collectives.
        flops: floating-point operations per second.
        layout: the stage, 1 to 3, and the elements of a bucket.
        on_cpu: whether the backend is gloo.
    """

    def __init__(
        self,
        states: ModelStates,
        units: tuple[PlannedUnit, ...],
        collectives: Collectives,
        flops: float,
        *,
        layout: Layout,
        on_cpu: bool,
    ) -> None:
        self.streams = Streams()
        self._states, self._collectives, self._flops = states, collectives, flops
        self._stage, self._on_cpu = layout.stage, on_cpu
        most = layout.bucket_numel or (CPU_BUCKET if on_cpu else CUDA_BUCKET)
        self._bucket = min(most, max(2, states.num_trained))
        """In elements."""
        self._began = 0.0
        """When the last unit was needed."""
        self._owned = states.gradient_bytes / collectives.num_ranks
        # Stage 3 gathers each large parameter by itself, as its module is used.
        large = [state.numel >= PERSISTENT_NUMEL for state in states.parameters]
        self._gather_seconds = [
            sum(
                collectives.all_gather(states.parameters[number].num_bytes)
                for number in unit.parameters
                if large[number]
            )
            for unit in units
        ]
        self._persistent = sum(
            state.num_bytes for state, is_large in zip(states.parameters, large, strict=True) if not is_large
        )

    def run(self, moments: Iterable[Moment], *, is_last: bool) -> None:
        """Run a micro-batch. Stages 2 and 3 reduce gradients in each, stage 1 in the last."""
        reduces = is_last or self._stage > 1
        in_backward = False
        filled, num_bytes, end = 0, 0, 0.0
        for kind, size, number in moments:
            if kind is Kind.COMPUTE:
                self.streams.compute(size / self._flops)
            elif kind is Kind.BACKWARD:
                in_backward = True
            elif self._stage == 3 and (kind is Kind.ENTER_BACKWARD or (kind is Kind.ENTER_FORWARD and not in_backward)):
                self._gather(number)
            elif kind is Kind.READY and reduces:
                state = self._states.parameters[number]
                if filled and filled + state.numel > self._bucket:
                    end = self._reduce(num_bytes)
                    filled = num_bytes = 0
                filled += state.numel
                num_bytes += state.gradient_bytes
        if num_bytes:
            end = self._reduce(num_bytes)
        self.streams.wait(end)

    def end(self) -> None:
        """Reduce the norm of the gradients, which the optimizer needs."""
        self.streams.run(self._collectives.all_reduce(4))

    def end_step(self) -> None:
        """Gather the updated parameters; at stage 3, only the small ones, which are not sharded."""
        gathered = self._persistent if self._stage == 3 else self._states.gradient_bytes
        if gathered:
            self.streams.run(self._collectives.all_gather(gathered))

    def _gather(self, index: int) -> None:
        # On CUDA, the trace of the first step lets DeepSpeed gather a unit while it computes the one before.
        earliest = None if self._on_cpu else self._began
        self._began = self.streams.now
        self.streams.wait(self.streams.start(self._gather_seconds[index], earliest))

    def _reduce(self, num_bytes: int) -> float:
        """Reduce a bucket and return when this ends."""
        # Gradients are copied into the bucket, the bucket into messages, and what arrives is added.
        self.streams.compute(self._collectives.copy(3 * num_bytes))
        if self._stage == 3:
            seconds = (
                self._collectives.direct_reduce_scatter(num_bytes)
                if self._on_cpu
                else self._collectives.reduce_scatter(num_bytes)
            )
        elif self._on_cpu:
            seconds = self._reduce_to_owners(num_bytes)
        else:
            seconds = self._collectives.all_reduce(num_bytes)
        end = self.streams.start(seconds)
        if self._on_cpu:
            self.streams.wait(end)
        return end

    def _reduce_to_owners(self, num_bytes: int) -> float:
        """Return the seconds in which each part of a bucket reaches its owner, as `GlooBackend.reduce` sends them.

        A rank takes the owners in turn. It sends without waiting, but waits to receive its own part, so an owner sends
        to the next ones only after that. The first owner receives from all others at once. Each further one waits for
        what the one before sends, at the same time as to the owners that follow.
        """
        num_ranks = self._collectives.num_ranks
        if num_ranks == 1:
            return 0.0
        owners = max(1, min(num_ranks, round(num_bytes / self._owned)))
        messages = (num_ranks - 1) + owners * (owners - 1) // 2
        return messages * (num_bytes / owners) / self._collectives.bandwidth + owners * self._collectives.message(0)
