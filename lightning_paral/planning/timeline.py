"""What a training step allocates and frees, in order."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple


class Kind(Enum):
    """What a moment of a step does."""

    ACTIVATION = "activation"
    """Allocates (or frees, if negative) memory in the forward or backward pass that is no gradient."""
    GRADIENT = "gradient"
    """Allocates or frees the full gradient of the parameter `number`."""
    READY = "ready"
    """The gradient of the parameter `number` has been added up in this backward pass."""
    CAST = "cast"
    """Allocates or frees a copy of the parameter `number` in a lower precision, which autocast keeps."""
    TEMPORARY = "temporary"
    """Allocates or frees memory inside `optimizer.step`."""
    COMPUTE = "compute"
    """Computes `size` floating-point operations."""
    ENTER_FORWARD = "enter forward"
    """The forward pass of unit `number` begins."""
    LEAVE_FORWARD = "leave forward"
    ENTER_BACKWARD = "enter backward"
    """The backward pass of unit `number` begins: all that follows may need its parameters."""
    BACKWARD = "backward"
    """The backward pass of the step begins."""
    OPTIMIZER = "optimizer"
    """The gradients are complete, and the optimizer begins."""
    END = "end"


class Moment(NamedTuple):
    """One moment of a step."""

    kind: Kind
    size: int = 0
    """Bytes, or floating-point operations."""
    number: int = -1
    """The number of a parameter or of a unit, where the kind needs one."""


@dataclass(frozen=True, kw_only=True)
class PlannedUnit:
    """Parameters that FSDP and ZeRO-3 gather together."""

    name: str
    """The dotted name; empty for the root."""
    parameters: tuple[int, ...]
    """Numbers of the parameters, in the order of the module."""


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """A training step of one process, in the order of Lightning: forward, `zero_grad`, backward, `optimizer.step`.

    The step is one after others, so optimizer states exist, and the gradients of the step before exist until
    `zero_grad`.
    """

    moments: Sequence[Moment]
    units: tuple[PlannedUnit, ...]
    """In the order of the module; the root is the last one."""
    initial_bytes: int = 0
    """The batch, which exists before the step."""
    has_activations: bool = True
    """Whether activations were followed. If not, only model states are in the timeline."""
    notes: tuple[str, ...] = ()
    """What was assumed."""

    @property
    def flops(self) -> int:
        """Floating-point operations of the step."""
        return sum(moment.size for moment in self.moments if moment.kind is Kind.COMPUTE)


def without_activations(units: tuple[PlannedUnit, ...], gradient_bytes: Sequence[int], reason: str) -> Timeline:
    """Return a step in which only gradients are allocated, unit by unit in reverse order.

    Args:
        units: the units, the root last.
        gradient_bytes: the size of each parameter's gradient in bytes; 0 if it is frozen.
        reason: why activations are unknown, for the report.
    """
    moments = [Moment(Kind.ENTER_FORWARD, number=len(units) - 1)]
    for index in range(len(units) - 1):
        moments += [Moment(Kind.ENTER_FORWARD, number=index), Moment(Kind.LEAVE_FORWARD, number=index)]
    moments += [Moment(Kind.LEAVE_FORWARD, number=len(units) - 1)]
    moments += [Moment(Kind.GRADIENT, -size, index) for index, size in enumerate(gradient_bytes) if size]
    moments += [Moment(Kind.BACKWARD), Moment(Kind.ENTER_BACKWARD, number=len(units) - 1)]
    for index in (*reversed(range(len(units) - 1)), len(units) - 1):
        if index != len(units) - 1:
            moments.append(Moment(Kind.ENTER_BACKWARD, number=index))
        for parameter in reversed(units[index].parameters):
            if gradient_bytes[parameter]:
                moments.append(Moment(Kind.GRADIENT, gradient_bytes[parameter], parameter))
                moments.append(Moment(Kind.READY, number=parameter))
    for parameter, size in enumerate(gradient_bytes):
        moments += [Moment(Kind.OPTIMIZER)] if parameter == 0 else []
        if size:  # Adam's temporaries
            moments += [Moment(Kind.TEMPORARY, 2 * size, parameter), Moment(Kind.TEMPORARY, -2 * size, parameter)]
    moments.append(Moment(Kind.END))
    return Timeline(moments=moments, units=units, has_activations=False, notes=(reason,))
