"""A step at another batch size, from the steps at two batch sizes."""

from collections.abc import Callable
from dataclasses import dataclass

from lightning_paral.planning.timeline import Moment, Timeline


@dataclass(frozen=True, kw_only=True)
class ScaledSteps:
    """Two steps of the same module; every size in between and beyond is taken as linear in the batch size."""

    small: Timeline
    large: Timeline
    small_size: int
    large_size: int

    def at(self, size: int) -> Timeline:
        """Return the step with a batch of `size` samples."""
        part = (size - self.small_size) / (self.large_size - self.small_size)

        def between(one: int, other: int) -> int:
            return round(one + part * (other - one))

        moments = [
            Moment(one.kind, between(one.size, other.size), one.number)
            for one, other in zip(self.small.moments, self.large.moments, strict=True)
        ]
        return Timeline(
            moments=moments,
            units=self.small.units,
            initial_bytes=between(self.small.initial_bytes, self.large.initial_bytes),
            notes=self.small.notes,
        )


def scaled_steps(small: Timeline, large: Timeline, small_size: int, large_size: int) -> ScaledSteps | None:
    """Return the two steps; `None` if they differ in more than sizes."""

    def shape(timeline: Timeline) -> list[tuple[object, int, bool]]:
        return [(moment.kind, moment.number, moment.size < 0) for moment in timeline.moments]

    if shape(small) != shape(large):
        return None
    return ScaledSteps(small=small, large=large, small_size=small_size, large_size=large_size)


def largest_size(fits: Callable[[int], bool]) -> int:
    """Return the largest batch size that fits, at most 2^20; 0 if none does."""
    if not fits(1):
        return 0
    low, high = 1, 2
    while high <= 2**20 and fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
