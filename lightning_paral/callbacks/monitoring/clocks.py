"""Clocks that mark moments of a step: of the host, or of a CUDA device."""

import time
from collections.abc import Sequence
from typing import Any, Protocol

import torch


class Clock(Protocol):
    """Marks moments, and tells later how much time was between them."""

    def mark(self) -> Any:
        """Return a mark of this moment. This waits for nothing."""

    def is_reached(self, mark: Any) -> bool:
        """Return whether the time of `mark` is known, without waiting."""

    def wait(self, mark: Any) -> None:
        """Wait until the time of `mark` is known."""

    def seconds(self, start: Any, end: Any) -> float:
        """Return the seconds between two marks that are reached."""

    def release(self, marks: Sequence[Any]) -> None:
        """Allow to use the objects of `marks` again."""


class HostClock:
    """The clock of the host. A mark is a number of seconds."""

    def __init__(self) -> None:
        self.mark = time.perf_counter

    def is_reached(self, mark: float) -> bool:
        """Return `True`."""
        return True

    def wait(self, mark: float) -> None:
        """Return at once."""

    def seconds(self, start: float, end: float) -> float:
        """Return the seconds between two marks."""
        return end - start

    def release(self, marks: Sequence[float]) -> None:
        """Do nothing."""


class DeviceClock:
    """The clock of a CUDA device. A mark is an event on the device's current stream.

    The host runs ahead of the device: times between marks are those that the stream takes, including the time in which
    it has no work, for example because the host loads data.

    Args:
        device: the CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: list[Any] = []

    def mark(self) -> Any:
        """Record an event."""
        event: Any = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def is_reached(self, mark: Any) -> bool:
        """Return whether the device has reached the event."""
        return bool(mark.query())

    def wait(self, mark: Any) -> None:
        """Wait until the device has reached the event."""
        mark.synchronize()

    def seconds(self, start: Any, end: Any) -> float:
        """Return the seconds between two events."""
        return float(start.elapsed_time(end)) / 1e3

    def release(self, marks: Sequence[Any]) -> None:
        """Keep events to record them again."""
        self._free += marks


def clock_for(device: torch.device) -> Clock:
    """Return the clock that knows how long work on `device` takes."""
    return DeviceClock(device) if device.type == "cuda" else HostClock()
