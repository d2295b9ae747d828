"""What one rank tells the others about its last steps."""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass

from lightning_paral.callbacks.monitoring.memory import MemoryUse
from lightning_paral.callbacks.monitoring.timeline import NUM_PHASES, Phase, StepTimes


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """Means per training batch of one rank, over some number of batches, and its memory. Times are in seconds."""

    num_steps: int
    data: float
    forward: float
    backward: float
    optimizer: float
    waiting: float | None
    """`None` if the engine waits for other ranks where it cannot be measured."""
    other: float
    own: float
    """The part of the step in which this rank did not wait for others, as far as that is known."""
    num_samples: float
    num_tokens: float
    sent_bytes: float | None
    """Bytes on the wire; `None` if they are unknown."""
    device_peak: int | None
    host: int
    host_peak: int
    host_grown: int | None = None
    """By how many bytes the peak of host memory exceeds what there was before the fit without the module's tensors;
    `None` if it is unknown."""

    @property
    def step(self) -> float:
        """The time of a step."""
        return self.data + self.forward + self.backward + self.optimizer + (self.waiting or 0.0) + self.other

    def to_json(self) -> str:
        """Return the report as text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "RankReport":
        """Return the report that `to_json` has written."""
        return cls(**json.loads(text))


class StepSums:
    """Sums of the times of steps."""

    def __init__(self) -> None:
        self.num_steps = 0
        """The number of steps."""
        self._seconds = [0.0] * NUM_PHASES
        self._num_samples = 0
        self._num_tokens = 0

    def add(self, steps: Iterable[StepTimes]) -> None:
        """Add steps."""
        for step in steps:
            self.num_steps += 1
            self._seconds = [sum(pair) for pair in zip(self._seconds, step.seconds, strict=True)]
            self._num_samples += step.num_samples
            self._num_tokens += step.num_tokens

    def report(
        self, memory: MemoryUse, sent_bytes: float | None, *, knows_waiting: bool, own_phases: Iterable[Phase]
    ) -> RankReport:
        """Return the means of the steps, of which there is at least one.

        Args:
            memory: the memory of this rank.
            sent_bytes: the bytes on the wire per step.
            knows_waiting: whether all waiting for other ranks was measured. Otherwise what was measured, outside of
                the engine, counts as other time.
            own_phases: the phases in which this rank does not wait for others.
        """
        means = [seconds / self.num_steps for seconds in self._seconds]
        waiting = means[Phase.WAITING]
        return RankReport(
            num_steps=self.num_steps,
            data=means[Phase.DATA],
            forward=means[Phase.FORWARD],
            backward=means[Phase.BACKWARD],
            optimizer=means[Phase.OPTIMIZER],
            waiting=waiting if knows_waiting else None,
            other=means[Phase.OTHER] + (0.0 if knows_waiting else waiting),
            own=sum(means[phase] for phase in own_phases),
            num_samples=self._num_samples / self.num_steps,
            num_tokens=self._num_tokens / self.num_steps,
            sent_bytes=sent_bytes,
            device_peak=memory.device_peak,
            host=memory.host,
            host_peak=memory.host_peak,
            host_grown=memory.host_grown,
        )
