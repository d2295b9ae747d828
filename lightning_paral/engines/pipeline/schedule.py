"""The order in which a stage runs the forward and backward passes of the micro-batches of a step."""

from dataclasses import dataclass
from typing import Literal

Schedule = Literal["1f1b", "gpipe"]


@dataclass(frozen=True)
class Pass:
    """A forward or backward pass of one micro-batch through the units of a stage."""

    direction: Literal["forward", "backward"]
    micro_batch: int


def passes_of_step(schedule: Schedule, stage: int, num_stages: int, num_micro_batches: int) -> list[Pass]:
    """Return the passes of one stage, in order.

    `"gpipe"` runs all forward passes first (Huang et al., arXiv:1811.06965). `"1f1b"` begins with a backward pass as
    soon as the first micro-batch has passed all stages, and then alternates, so that a stage keeps the activations of
    at most `num_stages - stage` micro-batches (Narayanan et al., arXiv:2006.09503). Both take the same time.

    Args:
        schedule: the schedule.
        stage: the stage, from 0.
        num_stages: the number of stages.
        num_micro_batches: the number of micro-batches of the step.
    """
    forward = [Pass("forward", number) for number in range(num_micro_batches)]
    backward = [Pass("backward", number) for number in range(num_micro_batches)]
    ahead = num_micro_batches if schedule == "gpipe" else min(num_micro_batches, num_stages - stage)
    passes = forward[:ahead]
    for next_forward, next_backward in zip(forward[ahead:], backward, strict=False):
        passes += [next_backward, next_forward]
    return passes + backward[num_micro_batches - ahead :]


def idle_fraction(num_stages: int, num_micro_batches: int) -> float:
    """Return the part of a step in which a stage waits, if all stages and micro-batches take the same time."""
    return (num_stages - 1) / (num_micro_batches + num_stages - 1)
