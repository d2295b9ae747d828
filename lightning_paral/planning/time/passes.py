"""The events of a step on which its time depends."""

from dataclasses import dataclass
from functools import cached_property

from lightning_paral.planning.timeline import Kind, Moment, Timeline

_EVENTS = (Kind.ENTER_FORWARD, Kind.LEAVE_FORWARD, Kind.ENTER_BACKWARD, Kind.BACKWARD, Kind.READY)


@dataclass(frozen=True)
class StepEvents:
    """The micro-batches of a step: operations, and what collectives depend on."""

    timeline: Timeline

    @cached_property
    def passes(self) -> tuple[tuple[Moment, ...], ...]:
        """The moments of each micro-batch of the timeline, which has two if gradients are accumulated."""
        root = len(self.timeline.units) - 1
        found: list[list[Moment]] = []
        flops = 0
        for moment in self.timeline.moments:
            if moment.kind is Kind.COMPUTE:
                flops += moment.size
                continue
            if moment.kind not in _EVENTS:
                continue
            if flops and found:
                found[-1].append(Moment(Kind.COMPUTE, flops))
                flops = 0
            if moment == Moment(Kind.ENTER_FORWARD, number=root):
                found.append([])
            if found:
                found[-1].append(moment)
        if flops and found:
            found[-1].append(Moment(Kind.COMPUTE, flops))
        return tuple(tuple(moments) for moments in found)
