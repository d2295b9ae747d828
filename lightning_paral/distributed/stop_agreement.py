"""Let all ranks stop after the same training batch, without a collective."""

import json
import threading
import time
from collections.abc import Callable

from torch.distributed.distributed_c10d import Store

from lightning_paral.distributed.watcher import RankWatcher
from lightning_paral.errors import ProcessGroupError

_ANSWER_SECONDS = 60.0
"""How long a rank waits for the answers of the others, which their watchers give within about a second."""


class StopAgreement:
    """Agrees on the training batch after which all ranks stop, once any rank has requested it.

    Batches are numbered from 1 in the order in which this process runs them. A rank is committed to the batch that it
    runs. When its watcher learns of a request, it answers with the number of that batch; from then on the main thread
    starts no further batch before it knows the outcome. Rank 0's watcher publishes the largest answer: each rank will
    complete this batch, and none has started a later one.

    Without a request, the main thread reads one attribute per batch.

    Args:
        watcher: the watcher of this rank; `None` if there is only one rank.
        on_request: a function that is called in some thread when this rank learns of a request, with the reason.
    """

    def __init__(self, watcher: RankWatcher | None, on_request: Callable[[str], None]) -> None:
        self.is_requested = False
        """Whether this rank has learned of a request."""
        self.reason = ""
        """The reason that the first request gave, the same on all ranks."""
        self._watcher = watcher
        self._on_request = on_request
        self._wanted = ""
        self._committed = 1
        self._stop_after: int | None = None
        self._is_decided = threading.Event()
        self._lock = threading.Lock()
        if watcher is not None:
            watcher.add(self)

    def request(self, reason: str) -> None:
        """Ask all ranks to stop. Call this in any thread."""
        with self._lock:
            if self._wanted or self.is_requested:
                return
            self._wanted = reason
        if self._watcher is None:
            self._learn(reason)
        else:
            self._watcher.wake()

    def is_stop(self, num_batches: int) -> bool:
        """Return whether to stop now, when the main thread has completed `num_batches` and is about to start another.

        After a request, wait for the answers of all ranks.

        Raises:
            ProcessGroupError: not all ranks answered within a minute.
        """
        self._committed = num_batches + 1  # before the next line, because the watcher reads them in the opposite order
        if not self.is_requested:
            return False
        if self._watcher is None:
            return True
        deadline = time.monotonic() + _ANSWER_SECONDS
        while not self._is_decided.wait(0.2):  # a short wait, which the failure of another rank can interrupt
            if time.monotonic() > deadline:
                raise ProcessGroupError(
                    f"{self.reason}, but not all ranks answered within {_ANSWER_SECONDS:.0f} s when to stop. Look for "
                    "the first error among all ranks."
                )
        assert self._stop_after is not None
        return num_batches >= self._stop_after

    def end(self) -> None:
        """Stop listening to the other ranks."""
        if self._watcher is not None:
            self._watcher.remove(self)

    def poll(self, store: Store) -> None:
        """Exchange messages with the other ranks, in the watcher's thread."""
        if self._is_decided.is_set():
            return
        assert self._watcher is not None
        if not self.is_requested:
            if self._wanted:
                store.compare_set("stop/request", "", json.dumps(self._wanted))
            elif not store.check(["stop/request"]):
                return
            self._learn(json.loads(store.get("stop/request")))
            store.set(f"stop/answer/{self._watcher.rank}", str(self._committed))
        answers = [f"stop/answer/{rank}" for rank in range(self._watcher.world_size)]
        if self._watcher.rank == 0 and store.check(answers):
            store.set("stop/after", str(max(int(store.get(answer)) for answer in answers)))
        if store.check(["stop/after"]):
            self._stop_after = int(store.get("stop/after"))
            self._is_decided.set()
        else:
            time.sleep(0.02)
            self._watcher.wake()

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle as `None`, because a watcher belongs to one process."""
        return type(None), ()

    def _learn(self, reason: str) -> None:
        self.reason = reason
        self.is_requested = True
        self._on_request(reason)
