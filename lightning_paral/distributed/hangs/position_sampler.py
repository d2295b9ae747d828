"""A thread that notes twice per second where the main thread is, and since when, if it makes no progress."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType

from lightning_paral.distributed.hangs.frames import frames_of
from lightning_paral.distributed.hangs.positions import Position, position_of

SAMPLE_SECONDS = 0.5


@dataclass(frozen=True)
class Sample:
    """Where the main thread was when it was last looked at. Times are those of `time.monotonic`."""

    position: Position
    taken: float
    """When it was last seen there."""
    since: float
    """When it was first seen in this line of the user's code, in the same batch."""
    still_since: float
    """When it was first seen in exactly this call, in the same batch."""


class PositionSampler:
    """Samples the position of the thread that creates this object, unless it has made progress since the last look.

    Args:
        progress: a function that returns a number which changes at least once per batch.
        interval: the number of seconds between two samples.
    """

    def __init__(self, progress: Callable[[], int], interval: float = SAMPLE_SECONDS) -> None:
        self.thread = threading.get_ident()
        """The identifier of the sampled thread."""
        self.sample: Sample | None = None
        """The last sample; `None` if the thread has made progress since."""
        self.is_frozen = False
        self._progress = progress
        self._key: object = None
        self._stack: object = None
        self._interval = interval
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lightning_paral_positions", daemon=True)
        self._thread.start()

    def freeze(self) -> None:
        """Keep the last sample from now on."""
        self.is_frozen = True

    def end(self) -> None:
        """End the thread, and wait for it, for a second at most: it would keep the run's objects in memory."""
        self._ended.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=1.0)

    def take(self) -> None:
        """Sample the position now, unless `freeze` was called."""
        frames = frames_of(self.thread)
        if frames and not self.is_frozen:
            self._take(frames)

    def _run(self) -> None:
        progress = None
        while not self._ended.wait(self._interval):
            before, progress = progress, self._progress()
            if progress == before:
                self.take()
            elif not self.is_frozen:
                self.sample = None

    def _take(self, frames: Sequence[FrameType]) -> None:
        now, progress, position = time.monotonic(), self._progress(), position_of(frames)
        key = progress, position
        # A value that differs between stacks: the function and the instruction of each frame.
        stack = progress, [(id(each.f_code), each.f_lasti) for each in frames]
        before = self.sample
        since = before.since if before is not None and key == self._key else now
        still_since = before.still_since if before is not None and stack == self._stack else now
        self._key, self._stack = key, stack
        self.sample = Sample(position, now, since, still_since)
