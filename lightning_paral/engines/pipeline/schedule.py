"""The schedules of a step, as a table: which pass of which micro-batch each stage runs next."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

Schedule = Literal["1f1b", "gpipe", "interleaved"]


@dataclass(frozen=True)
class Pass:
    """A forward or backward pass of one micro-batch through the units of one part of the chain."""

    direction: Literal["forward", "backward"]
    micro_batch: int
    part: int
    """With S stages, stage s has the parts s, s + S, s + 2 S and so on."""


def passes_of_step(
    schedule: Schedule, stage: int, num_stages: int, num_micro_batches: int, parts_per_stage: int = 1
) -> list[Pass]:
    """Return the passes of one stage, in order.

    `"gpipe"` runs all forward passes first (Huang et al., arXiv:1811.06965). `"1f1b"` begins with a backward pass as
    soon as the first micro-batch has passed all stages, and then alternates, so that a stage keeps the activations of
    at most `num_stages - stage` micro-batches (Narayanan et al., arXiv:2006.09503). `"interleaved"` does the same with
    several parts per stage (Narayanan et al., arXiv:2104.04473, section 2.2): as many micro-batches as there are stages
    pass through all parts, in turns, and then the next ones. If the number of micro-batches is no multiple, these
    rounds are larger.

    Stages never wait for each other in a circle, and two stages have the passes between them in the same order.

    Args:
        schedule: the schedule.
        stage: the stage, from 0.
        num_stages: the number of stages.
        num_micro_batches: the number of micro-batches of the step.
        parts_per_stage: the number of parts that each stage has.
    """
    own = range(stage, num_stages * parts_per_stage, num_stages)
    num_rounds = max(1, num_micro_batches // num_stages)
    bounds = [num_micro_batches * number // num_rounds for number in range(num_rounds + 1)]
    rounds = [range(start, stop) for start, stop in pairwise(bounds)]
    forward = [Pass("forward", number, part) for each in rounds for part in own for number in each]
    backward = [Pass("backward", number, part) for each in rounds for part in reversed(own) for number in each]
    if schedule == "gpipe":
        ahead = len(forward)
    elif parts_per_stage == 1:
        ahead = num_stages - stage
    else:
        ahead = 2 * (num_stages - stage) - 1 + (parts_per_stage - 1) * max(map(len, rounds))
    ahead = min(ahead, len(forward))
    passes = forward[:ahead]
    for next_forward, next_backward in zip(forward[ahead:], backward, strict=False):
        passes += [next_backward, next_forward]
    return passes + backward[len(forward) - ahead :]


def idle_fraction(num_stages: int, num_micro_batches: int, parts_per_stage: int = 1) -> float:
    """Return the part of a step in which a stage waits, if all parts and micro-batches take the same time."""
    waits = num_stages - 1
    waits += (parts_per_stage - 1) * max(0, num_stages - num_micro_batches)  # for a micro-batch to come around again
    return waits / (num_micro_batches * parts_per_stage + waits)
