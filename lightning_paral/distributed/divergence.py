"""Notice that ranks part during a fit: other steps in an epoch."""

import json
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from lightning_paral.distributed.exchange import check_same, name_ranks
from lightning_paral.distributed.watcher import RankWatcher
from lightning_paral.errors import ConfigurationError, ProcessGroupError

_SAME_STEPS = (
    "All ranks must run the same steps, because gradients are averaged over all of them. Do not skip a batch or end an "
    "epoch on some ranks only: give all ranks the same number of batches, return -1 from on_train_batch_start on all "
    "ranks or on none, and in manual optimization run the backward pass of a zero loss (0 * loss) instead of skipping "
    "it."
)
_ALL = "all have ended it"
_COUNTED = ("epochs", "training steps", "backward passes", "optimizer steps")
_FIRST_PAUSE, _LONGEST_PAUSE = 0.01, 0.2
"""Seconds between two looks at the store."""


class EpochAgreement:
    """Compares the progress of the ranks at the end of each epoch: a `Topic` of the watcher.

    A rank that ends the epoch waits, through the store, until all ranks have ended it. Then they compare what they have
    counted. The watcher of a rank that has begun another batch instead tells those that wait, because its main thread
    soon waits for them in a collective.

    Args:
        watcher: the watcher of the run.
        timeout: how long to wait for the others.
        num_batches: returns the number of batches that have begun. It is called in several threads.
    """

    def __init__(self, watcher: RankWatcher, timeout: timedelta, num_batches: Callable[[], int]) -> None:
        self.backwards = 0
        """Backward passes that have begun in the run."""
        self.optimizer_steps = 0
        """Optimizer steps that have ended in the run."""
        self._watcher = watcher
        self._timeout = timeout
        self._num_batches = num_batches
        self._number = 0
        """The number of epochs that this rank has ended in the run."""

    def end_epoch(self, current: int) -> None:
        """Wait until all ranks have ended the epoch. *Collective* over the world.

        Args:
            current: the epoch.

        Raises:
            ConfigurationError: a rank continues with the epoch, or has run a different number of steps. The message
                names the ranks.
            ProcessGroupError: a rank has not ended the epoch within the timeout.
        """
        store: Any = self._watcher.main_store
        self._number += 1
        epoch, num_batches = f"epochs/{self._number}", self._num_batches()
        store.set(f"{epoch}/{self._watcher.rank}", "")
        store.set("epochs/latest", json.dumps([self._number, current, num_batches]))
        if store.add(f"{epoch}/ended", 1) == self._watcher.world_size:
            store.compare_set(f"{epoch}/verdict", "", _ALL)
        deadline, pause = time.monotonic() + self._timeout.total_seconds(), _FIRST_PAUSE
        while not store.check([f"{epoch}/verdict"]):
            if time.monotonic() > deadline:
                absent = sorted(set(range(self._watcher.world_size)) - set(self._ended(store, self._number)))
                raise ProcessGroupError(
                    f"The end of epoch {current} timed out after {self._timeout}: {name_ranks(absent)} did "
                    f"not end it. {_SAME_STEPS}"
                )
            time.sleep(pause)
            pause = min(1.5 * pause, _LONGEST_PAUSE)  # so that many ranks that wait long do not keep the store busy
        verdict = store.get(f"{epoch}/verdict").decode()
        if verdict != _ALL:
            raise ConfigurationError(f"{verdict} {_SAME_STEPS}")
        counts = zip(_COUNTED, (current, num_batches, self.backwards, self.optimizer_steps), strict=True)
        facts = {(f"At the end of an epoch, the number of {name}", "is"): str(count) for name, count in counts}
        check_same(facts, _SAME_STEPS)

    def poll(self, store: Any) -> None:
        """Tell the others if they have ended an epoch in which this rank has begun another batch."""
        if not store.check(["epochs/latest"]):
            return
        number, epoch, num_batches = json.loads(store.get("epochs/latest"))
        # In this order: the main thread ends the epoch before it begins a batch of the next one.
        if self._num_batches() > num_batches and self._number < number:
            verdict = (
                f"In epoch {epoch}, {name_ranks(self._ended(store, number))} ended the epoch after {num_batches} "
                f"training steps, while {name_ranks([self._watcher.rank])} began another batch."
            )
            store.compare_set(f"epochs/{number}/verdict", "", verdict)

    def _ended(self, store: Any, number: int) -> list[int]:
        """Return the ranks that have ended the epoch."""
        return [rank for rank in range(self._watcher.world_size) if store.check([f"epochs/{number}/{rank}"])]

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle as `None`, because it belongs to one run in one process."""
        return type(None), ()
