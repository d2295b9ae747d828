"""Predicted times and memory of all strategies at several numbers of ranks, each with the same batch per rank."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lightning_paral.errors import ConfigurationError
from lightning_paral.planning.estimate import rank_memory
from lightning_paral.planning.following import FollowedSteps
from lightning_paral.planning.layout import Layout
from lightning_paral.planning.settings import StepSettings
from lightning_paral.planning.time.machine import Machine
from lightning_paral.planning.time.passes import StepEvents
from lightning_paral.planning.time.step_time import step_seconds

WORLD_SIZES = tuple(2**exponent for exponent in range(13))
"""1 to 4096."""


@dataclass(frozen=True, kw_only=True)
class ScalingRow:
    """A strategy at a number of ranks."""

    layout: Layout
    world_size: int
    seconds: float | None
    """The predicted time of an optimizer step; `None` if it is unknown."""
    samples_per_second: float | None
    """Of all ranks together."""
    tokens_per_second: float | None
    """`None` if the number of tokens of a sample is unknown."""
    peak_bytes: int | None
    """Memory of a rank at its peak; `None` if the time is unknown."""
    fits: bool | None
    """Whether the peak leaves the margin of the device's memory; `None` if one of them is unknown."""

    def as_dict(self) -> dict[str, Any]:
        """Return the row as JSON values."""
        return {
            "name": self.layout.name,
            "world_size": self.world_size,
            "seconds": self.seconds,
            "samples_per_second": self.samples_per_second,
            "tokens_per_second": self.tokens_per_second,
            "peak_bytes": self.peak_bytes,
            "fits": self.fits,
        }


def parse_world_sizes(text: str) -> tuple[int, ...]:
    """Return numbers of ranks from text such as `1,8,64`.

    Raises:
        ConfigurationError: one is not a positive whole number.
    """
    parts = [part.strip() for part in text.split(",")]
    for part in parts:
        if not part.isdecimal() or not int(part):
            raise ConfigurationError(
                f"--scale {text!r}: {part!r} is not a number of ranks. Give numbers with commas, such as 1,8,64."
            )
    return tuple(int(part) for part in parts)


def rate(per_step: int | None, settings: StepSettings, num_ranks: int, seconds: float | None) -> float | None:
    """Return samples or tokens per second of all ranks; `None` if something is unknown.

    Args:
        per_step: samples or tokens of a micro-batch of a rank.
        settings: the number of micro-batches.
        num_ranks: the number of ranks.
        seconds: the time of an optimizer step.
    """
    return None if per_step is None or not seconds else per_step * settings.accumulate * num_ranks / seconds


def scaling_rows(
    followed: FollowedSteps,
    layouts: Sequence[Layout],
    world_sizes: Sequence[int],
    settings: StepSettings,
    machine: Machine,
    *,
    on_cpu: bool,
    usable_memory: float | None = None,
    tokens_per_sample: int | None = None,
) -> tuple[ScalingRow, ...]:
    """Return a row for each layout and number of ranks.

    Args:
        followed: the step with the batch of one rank.
        layouts: the strategies.
        world_sizes: the numbers of ranks.
        settings: the Trainer's settings.
        machine: how fast ranks compute and communicate.
        on_cpu: whether the device is the CPU, and the backend gloo.
        usable_memory: the bytes of a device that a rank may use; `None` if they are unknown.
        tokens_per_sample: the number of tokens of a sample; `None` if it is unknown.
    """
    rows = []
    for layout in layouts:
        timeline = followed.timeline(layout)
        events = StepEvents(timeline)
        for size in world_sizes:
            seconds = step_seconds(layout, events, followed.states, size, settings, machine, on_cpu=on_cpu)
            peak = None
            if seconds is not None:
                peak = rank_memory(layout, timeline, followed.states, size, settings, on_cpu=on_cpu).peak_bytes
            samples = followed.batch_size
            tokens = None if samples is None or tokens_per_sample is None else samples * tokens_per_sample
            rows.append(
                ScalingRow(
                    layout=layout,
                    world_size=size,
                    seconds=seconds,
                    samples_per_second=rate(samples, settings, size, seconds),
                    tokens_per_second=rate(tokens, settings, size, seconds),
                    peak_bytes=peak,
                    fits=None if peak is None or usable_memory is None else peak <= usable_memory,
                )
            )
    return tuple(rows)
