"""The time of a step under DDP: buckets of gradients are averaged while the backward pass computes the next ones."""

from collections.abc import Iterable

from lightning_paral.planning.layout import Layout
from lightning_paral.planning.states import ModelStates
from lightning_paral.planning.time.collectives import Collectives
from lightning_paral.planning.time.streams import Streams
from lightning_paral.planning.timeline import Kind, Moment

_FIRST_BUCKET = 2**20
"""Bytes after which DDP closes the first bucket, so that it starts early (`dist._DEFAULT_FIRST_BUCKET_BYTES`)."""
_BUCKET = 25 * 2**20


class DDPStep:
    """Runs micro-batches on two streams. gloo has threads of its own, so the CPU computes meanwhile as well.

    Args:
        states: the states of the module.
        collectives: the costs of collectives.
        flops: floating-point operations per second.
        layout: whether this package's ring averages gradients, and the bytes per element on the wire.
    """

    def __init__(self, states: ModelStates, collectives: Collectives, flops: float, layout: Layout) -> None:
        self.streams = Streams()
        self._states, self._collectives, self._flops = states, collectives, flops
        self._ring = layout.all_reduce == "ring"
        itemsize = states.gradient_bytes / max(1, states.num_trained)
        self._on_wire = 1.0 if layout.wire_itemsize is None else layout.wire_itemsize / itemsize
        """Bytes on the wire for a byte of gradients."""

    def run(self, moments: Iterable[Moment], *, is_last: bool) -> None:
        """Run a micro-batch. Gradients are averaged in the last one."""
        filled, limit, end = 0, _FIRST_BUCKET, 0.0
        for kind, size, number in moments:
            if kind is Kind.COMPUTE:
                self.streams.compute(size / self._flops)
            elif kind is Kind.READY and is_last:
                num_bytes = self._states.parameters[number].gradient_bytes
                self.streams.compute(self._collectives.copy(num_bytes))
                filled += num_bytes
                if filled >= limit:
                    end = self.streams.start(self._all_reduce(filled))
                    filled, limit = 0, _BUCKET
        if filled:
            end = self.streams.start(self._all_reduce(filled))
        self.streams.wait(end)

    def end(self) -> None:
        """Copy the averages from the buckets to the gradients."""
        self.streams.compute(self._collectives.copy(self._states.gradient_bytes))

    def end_step(self) -> None:
        """Do what follows the optimizer: nothing."""

    def _all_reduce(self, num_bytes: int) -> float:
        return self._collectives.all_reduce(num_bytes * self._on_wire, ring=self._ring)
