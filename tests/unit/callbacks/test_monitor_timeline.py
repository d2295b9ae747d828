"""Every moment of a step belongs to one phase."""

from collections.abc import Sequence

import pytest

from lightning_paral.callbacks.monitoring.clocks import HostClock
from lightning_paral.callbacks.monitoring.timeline import Phase, StepTimes, Timeline


class Steps:
    """A clock that advances by one second per mark. Marks are reached when the test says so, as on a device."""

    def __init__(self) -> None:
        self.now = 0
        self.reached = 10**6
        self.released: list[float] = []

    def mark(self) -> float:
        self.now += 1
        return self.now

    def is_reached(self, mark: float) -> bool:
        return mark <= self.reached

    def wait(self, mark: float) -> None:
        self.reached = max(self.reached, int(mark))

    def seconds(self, start: float, end: float) -> float:
        assert max(start, end) <= self.reached
        return end - start

    def release(self, marks: Sequence[float]) -> None:
        self.released += marks


def by_phase(step: StepTimes) -> dict[str, float]:
    return {phase.name: step.seconds[phase] for phase in Phase if step.seconds[phase]}


def test_nested_phases_are_not_counted_twice() -> None:
    timeline = Timeline(Steps())
    timeline.begin(Phase.OPTIMIZER)  # 1 s of other time before
    timeline.begin(Phase.FORWARD)
    timeline.end(Phase.FORWARD)
    timeline.begin(Phase.BACKWARD)
    timeline.begin(Phase.WAITING)
    timeline.end(Phase.BACKWARD)  # ends the waiting as well
    timeline.end(Phase.OPTIMIZER)
    timeline.end_step(4, 8)
    (step,) = timeline.take_steps()

    assert by_phase(step) == {"OTHER": 2, "OPTIMIZER": 3, "FORWARD": 1, "BACKWARD": 1, "WAITING": 1}
    assert (step.num_samples, step.num_tokens) == (4, 8)
    assert timeline.take_steps() == []


def test_time_without_a_step_is_counted_to_none() -> None:
    timeline = Timeline(Steps())
    timeline.pause()
    timeline.begin(Phase.DATA)  # of validation
    timeline.end(Phase.DATA)
    timeline.pause()
    timeline.resume()
    timeline.resume()
    timeline.end_step(1, 0)

    assert by_phase(timeline.take_steps()[0]) == {"OUTSIDE": 1, "OTHER": 2}


def test_phases_that_an_exception_left_open_end_with_the_step() -> None:
    timeline = Timeline(Steps())
    timeline.begin(Phase.BACKWARD)
    timeline.end_step(1, 0)
    timeline.end(Phase.BACKWARD)
    timeline.end_step(1, 0)

    assert [by_phase(step) for step in timeline.take_steps()] == [{"OTHER": 1, "BACKWARD": 1}, {"OTHER": 1}]


def test_steps_are_returned_when_the_device_has_completed_them() -> None:
    clock = Steps()
    timeline = Timeline(clock)
    for _ in range(3):
        timeline.begin(Phase.DATA)
        timeline.end_step(1, 0)  # at 3, 5 and 7 s
    clock.reached = 5
    reached = timeline.take_steps()

    assert len(reached) == 2
    assert timeline.take_steps() == []
    assert len(timeline.take_steps(wait=True)) == 1
    assert clock.released == [1, 2, 3, 4, 5, 6]  # the last mark begins the next step


@pytest.mark.parametrize("num_steps", [1, 40])
def test_phases_of_the_host_add_up_to_the_time_between_steps(num_steps: int) -> None:
    clock = HostClock()
    begin = clock.mark()
    timeline = Timeline(clock)
    for _ in range(num_steps):
        for phase in (Phase.DATA, Phase.FORWARD, Phase.BACKWARD):
            timeline.begin(phase)
            timeline.end(phase)
        timeline.end_step(1, 0)
    end = clock.mark()
    total = sum(sum(step.seconds) for step in timeline.take_steps())

    assert 0 < total <= end - begin
