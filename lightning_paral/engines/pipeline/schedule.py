"""The passes of a step: their order on each stage, and the weights and random numbers of the micro-batches."""

import pickle
import random
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_paral.compat.torch.tensors import divisor_of
from lightning_paral.distributed.rng_state import derive_seed, draw_from, set_torch_states, torch_states
from lightning_paral.engines.pipeline.options import Schedule

States = tuple[Any, Any, Any]


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


class MicroBatchWeights:
    """Weighs the losses of micro-batches by their samples, or by the targets that their cross entropies do not ignore.

    By what the cross entropy of the whole batch divides is known only after the backward passes of the first
    micro-batches. Gradients are therefore scaled by an estimate, and have to be corrected after the last.

    Args:
        sizes: the numbers of samples of the micro-batches.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes, self._total = sizes, max(1, sum(sizes))
        self._divisors: dict[int, Tensor] = {}

    def weighted(self, number: int, loss: Tensor) -> Tensor:
        """Return the `loss` of a micro-batch, multiplied by its weight in the batch, which may be an estimate."""
        divisor = divisor_of(loss)
        if divisor is None:
            return loss * (self._sizes[number] / self._total)
        self._divisors[number] = divisor.float()
        return loss * (self._divisors[number] / self._estimate())

    def known(self) -> tuple[list[float], float]:
        """Return the weights of all micro-batches, and by what their gradients have to be multiplied."""
        if not self._divisors:
            return list(self._sizes), 1  # an integer, which costs no message
        # A step may leave the cross entropy out if a micro-batch has no targets.
        none = torch.zeros_like(self._estimate())
        divisors = [self._divisors.get(number, none) for number in range(len(self._sizes))]
        *weights, estimate = torch.stack([*divisors, self._estimate()]).tolist()
        return weights, estimate / sum(weights) if any(weights) else 1.0

    def _estimate(self) -> Tensor:
        first, divisor = next(iter(self._divisors.items()))
        return divisor.mul(self._total / max(1, self._sizes[first])).clamp(min=1.0)


class RandomStreams:
    """The states of the global generators of torch, numpy and `random` in the forward passes of one stage.

    All stages run the code of a step before its first unit, so it must draw the same numbers there. The units of each
    part then draw from generators of their own, whose seed follows from the state of torch's generator and the numbers
    of the part and the micro-batch. After the pass, the global generators continue where the first unit was called, so
    that they stay equal on all stages, and need no state but that which every checkpoint has. The passes of a
    micro-batch through further parts of the stage begin with the states with which the first one began.

    Args:
        module: the LightningModule.
        parts: the numbers of the parts of this stage.
    """

    def __init__(self, module: LightningModule, parts: Sequence[int]) -> None:
        self._module = module
        self._parts = parts
        self._starts: dict[int, States] = {}
        """If there are several parts, the states with which the passes of each micro-batch begin."""
        self._place = 0, 0
        self._of_numpy = np.random.MT19937()

    @contextmanager
    def of_pass(self, micro_batch: int, part: int) -> Iterator[None]:
        """Run the forward pass of a micro-batch through a part in the block."""
        self._place = part, micro_batch
        with ExitStack() as self._until_end:
            if part != self._parts[0]:
                self._until_end.callback(set_states, states())
                set_states(self._starts[micro_batch])
            elif len(self._parts) > 1:
                self._starts[micro_batch] = states()
            yield

    def enter_units(self) -> None:
        """Let the units of the part draw other numbers than those of other parts, until the pass ends."""
        self._until_end.callback(set_torch_states, torch_states())
        drawn = int(torch.randint(2**63 - 1, (), device="cpu"))
        part, micro_batch = self._place
        seed = derive_seed(drawn, part, self._module.trainer.fit_loop.total_batch_idx, micro_batch)
        self._until_end.callback(draw_from(seed, self._of_numpy))


def states() -> States:
    """Return the states of the global generators of torch, numpy and `random`."""
    return torch_states(), np.random.get_state(), random.getstate()


def set_states(states: States) -> None:
    """Set the generators to what `states` has returned."""
    set_torch_states(states[0])
    np.random.set_state(states[1])
    random.setstate(states[2])


def generator_states() -> bytes:
    """Return the states of the generators as bytes, which can be compared."""
    of_torch, *others = states()
    return pickle.dumps(([state.numpy().tobytes() for state in of_torch], *others))
