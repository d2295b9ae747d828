"""Attribute every moment of a training step to one phase."""

from collections import deque
from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise
from typing import Any

from lightning_paral.callbacks.monitoring.clocks import Clock


class Phase(IntEnum):
    """What a rank does. Each moment belongs to one phase: to the innermost one if they are nested."""

    DATA = 0
    FORWARD = 1
    BACKWARD = 2
    OPTIMIZER = 3
    WAITING = 4
    OTHER = 5
    OUTSIDE = 6
    """Not in a step: validation, and the time between two epochs."""


NUM_PHASES = len(Phase)


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """The times of one training batch."""

    seconds: tuple[float, ...]
    """By phase."""
    num_samples: int
    """The number of samples of this rank."""
    num_tokens: int
    """The number of tokens of this rank; 0 if it is unknown."""


class Timeline:
    """Records when phases begin and end, and sums up each step once its times are known.

    Recording waits for nothing and makes no tensors.

    Args:
        clock: marks moments.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._mark = clock.mark
        self._open: list[Phase] = []
        self._marks: list[tuple[Phase, Any]] = [(Phase.OTHER, self._mark())]
        self._steps: deque[tuple[list[tuple[Phase, Any]], int, int]] = deque()
        self._is_paused = False

    def begin(self, phase: Phase) -> None:
        """Begin a phase, possibly inside of another one."""
        if not self._is_paused:
            self._open.append(phase)
            self._marks.append((phase, self._mark()))

    def end(self, phase: Phase) -> None:
        """End the innermost phase of this kind, and all phases inside of it. Without one, do nothing."""
        if self._is_paused or phase not in self._open:
            return
        while self._open.pop() is not phase:
            pass
        self._marks.append((self._open[-1] if self._open else Phase.OTHER, self._mark()))

    def pause(self) -> None:
        """Count the time until `resume` to no step."""
        if not self._is_paused:
            self._open.clear()
            self.begin(Phase.OUTSIDE)
            self._is_paused = True

    def resume(self) -> None:
        """End what `pause` began."""
        self._is_paused = False
        self.end(Phase.OUTSIDE)

    def end_step(self, num_samples: int, num_tokens: int) -> None:
        """End a step, and begin the next one.

        Args:
            num_samples: the number of samples of this rank in the step.
            num_tokens: the number of tokens of this rank in the step.
        """
        self._open.clear()
        now = (Phase.OTHER, self._mark())
        self._marks.append(now)
        self._steps.append((self._marks, num_samples, num_tokens))
        self._marks = [now]

    def take_steps(self, *, wait: bool = False) -> list[StepTimes]:
        """Return the times of the steps that were not returned before and that the device has completed.

        Args:
            wait: whether to wait for the steps that it has not completed. Only for the end of a run.
        """
        taken = []
        while self._steps:
            marks, num_samples, num_tokens = self._steps[0]
            for _, mark in marks if wait else ():
                self._clock.wait(mark)
            if not all(self._clock.is_reached(mark) for _, mark in marks):  # they may be on several streams
                break
            self._steps.popleft()
            seconds = [0.0] * NUM_PHASES
            for (phase, start), (_, end) in pairwise(marks):
                seconds[phase] += self._clock.seconds(start, end)
            self._clock.release([mark for _, mark in marks[:-1]])  # the last one begins the next step
            taken.append(StepTimes(seconds=tuple(seconds), num_samples=num_samples, num_tokens=num_tokens))
        return taken
