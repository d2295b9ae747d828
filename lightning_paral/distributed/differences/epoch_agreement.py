"""Notice that a rank has ended an epoch while another one continues with it, and name the ranks."""

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

from torch.distributed.distributed_c10d import PrefixStore, Store

from lightning_paral.compat.torch.process_groups import default_store
from lightning_paral.distributed.differences.same_on_ranks import values_by_rank
from lightning_paral.distributed.frames import frames_of
from lightning_paral.distributed.rank_names import name_ranks
from lightning_paral.distributed.watcher import RankWatcher
from lightning_paral.errors import ConfigurationError

WAITING_SECONDS = 10.0
"""How long a rank must be in the same collective to count as waiting for the ranks that have ended the epoch."""
_POLL_SECONDS, _LONGEST_POLL_SECONDS = 0.01, 0.2
_STUCK_SECONDS = 2.0
"""How long each rank must have ended the epoch, or wait, before this counts: a rank that waited may go on."""
_NO_ANSWER = "null"
_BACKWARD_SECONDS = 60.0
"""The same for a backward pass, of which Python cannot tell whether it computes or waits."""
_IN_COLLECTIVES = ("torch/distributed/", "deepspeed/comm/")
_IN_BACKWARD = "torch/autograd/graph.py"


@dataclass
class Progress:
    """What this rank has done since the run began. The main thread counts, the watcher reads."""

    epoch: int = 0
    batches: int = 0
    """Training steps that have begun."""
    backwards: int = 0
    """Backward passes that have begun."""
    optimizer_steps: int = 0
    """Optimizer steps that have ended."""


class EpochAgreement:
    """Compares the progress of the ranks at the end of each epoch, through the store: a `Topic` of the watcher.

    A rank that ends the epoch waits for the answer of each other rank: it has ended the epoch as well, it has begun
    another batch, or it waits in a collective. The watcher answers for a main thread that does not end the epoch.

    Args:
        watcher: the watcher of the run.
        timeout: how long to wait for the others.
    """

    def __init__(self, watcher: RankWatcher, timeout: timedelta) -> None:
        self.progress = Progress()
        self._rank, self._num_ranks = watcher.rank, watcher.world_size
        self._run, self._main_thread = watcher.run, watcher.main_thread
        self._timeout = timeout
        self._ended: set[int] = set()
        self._answered: dict[int, str] = {}
        self._place: Any = None
        self._place_since = 0.0

    def end_epoch(self, number: int) -> None:
        """Wait until all ranks have ended the epoch. *Collective* over the world.

        Args:
            number: a number for this end of an epoch, equal on all ranks, which the run has not used before.

        Raises:
            ConfigurationError: a rank continues with the epoch, or has run a different number of steps. The message
                names the ranks.
        """
        store = PrefixStore(f"lightning_paral/run/{self._run}/epochs", default_store())
        self._ended.add(number)
        own = json.dumps(asdict(self.progress))
        store.set(f"{number}/{self._rank}", own)
        num_equal = store.add(f"{number}/equal/{own}", 1)
        if num_equal == self._num_ranks:
            store.set(f"{number}/all", "")
            return
        if num_equal == 1 and store.add(f"{number}/values", 1) > 1:
            store.set(f"{number}/differ", "")
        store.set("latest", json.dumps([number, self.progress.batches]))
        deadline = time.monotonic() + self._timeout.total_seconds()
        stuck_since: float | None = None
        pause = _POLL_SECONDS  # becomes longer, so that many ranks that wait long do not keep the store busy
        while not store.check([f"{number}/all"]):
            stuck_since = (stuck_since or time.monotonic()) if self._all_end_or_wait(store, number) else None
            is_stuck = stuck_since is not None and time.monotonic() - stuck_since > _STUCK_SECONDS
            if is_stuck or store.check([f"{number}/differ"]) or time.monotonic() > deadline:
                self._raise(store, number)
            time.sleep(pause)
            pause = min(1.5 * pause, _LONGEST_POLL_SECONDS)

    def poll(self, store: Store) -> None:
        """Answer for this rank if others have ended an epoch that it has not ended."""
        if not store.check(["epochs/latest"]):
            return
        number, batches = json.loads(store.get("epochs/latest"))
        if number in self._ended:
            self._place = None
            return
        key = f"epochs/{number}/{self._rank}"
        waits = self._waits_in_collective()
        if self.progress.batches > batches:
            store.set(key, json.dumps({"kind": "begun", **asdict(self.progress)}))
            store.set(f"epochs/{number}/differ", "")
        elif waits and number not in self._answered:
            self._answered[number] = json.dumps({"kind": "waits", **asdict(self.progress)})
            store.set(key, self._answered[number])
            store.set(f"epochs/{number}/waits", "")
        elif not waits and number in self._answered:
            # Unless the main thread has just ended the epoch, and has written its progress.
            store.compare_set(key, self._answered.pop(number), _NO_ANSWER)

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle as `None`, because it belongs to one run in one process."""
        return type(None), ()

    def _waits_in_collective(self) -> bool:
        """Return whether the main thread has been at the same place in a collective for `WAITING_SECONDS`."""
        frame = next(iter(frames_of(self._main_thread)), None)
        if frame is None:
            return False
        # Frames of later batches may have the same address, so the place includes the progress.
        place = (id(frame), frame.f_lasti, self.progress.batches, self.progress.backwards)
        if place != self._place:
            self._place, self._place_since = place, time.monotonic()
        since, file = time.monotonic() - self._place_since, frame.f_code.co_filename
        if _IN_BACKWARD in file:
            return since > _BACKWARD_SECONDS
        return since > WAITING_SECONDS and any(part in file for part in _IN_COLLECTIVES)

    def _all_end_or_wait(self, store: Store, number: int) -> bool:
        """Return whether some ranks wait in a collective, and all others have ended the epoch."""
        if not store.check([f"{number}/waits"]):
            return False
        found = self._answers(store, number)
        return len(found) == self._num_ranks and any("kind" in answer for answer in found.values())

    def _answers(self, store: Store, number: int) -> dict[int, dict[str, Any]]:
        keys = {rank: f"{number}/{rank}" for rank in range(self._num_ranks)}
        found = {rank: json.loads(store.get(key)) for rank, key in keys.items() if store.check([key])}
        return {rank: answer for rank, answer in found.items() if answer is not None}

    def _raise(self, store: Store, number: int) -> None:
        time.sleep(2 * _POLL_SECONDS)
        own = json.loads(store.get(f"{number}/{self._rank}"))
        raise ConfigurationError(explain(own["epoch"], self._answers(store, number), list(range(self._num_ranks))))


def explain(epoch: int, found: dict[int, dict[str, Any]], ranks: list[int]) -> str:
    """Return the message for ranks that did not end the epoch in the same way.

    Args:
        epoch: the epoch.
        found: the progress of each rank that has answered, with `"kind"` if it has not ended the epoch.
        ranks: all ranks.
    """
    ended = [rank for rank in ranks if rank in found and "kind" not in found[rank]]
    begun = [rank for rank in ranks if found.get(rank, {}).get("kind") == "begun"]
    waiting = [rank for rank in ranks if found.get(rank, {}).get("kind") == "waits"]
    absent = [rank for rank in ranks if rank not in found]
    describe: list[tuple[str, Callable[[dict[str, Any]], int]]] = [
        ("training steps", lambda progress: int(progress["batches"])),
        ("backward passes", lambda progress: int(progress["backwards"])),
        ("optimizer steps", lambda progress: int(progress["optimizer_steps"])),
    ]
    if len(ended) < len(ranks):
        others = [
            f"{name_ranks(members)} {verb}"
            for members, verb in (
                (begun, "began another batch"),
                (waiting, "waited in a collective of the last batch"),
                (absent, "did not answer"),
            )
            if members
        ]
        what = (
            f"In epoch {epoch}, {name_ranks(ended)} ended the epoch after {found[ended[0]]['batches']} training steps "
            f"of this run, while {', and '.join(others)}."
        )
    else:
        name, values = next(
            (name, values)
            for name, count in describe
            if len(set((values := {rank: str(count(found[rank])) for rank in ended}).values())) > 1
        )
        what = f"Until the end of epoch {epoch}, the number of {name} is {values_by_rank(values)}."
    return (
        f"{what} All ranks must run the same steps, because gradients are averaged over all of them. Do not skip a "
        "batch or end an epoch on some ranks only: give all ranks the same number of batches, return -1 from "
        "on_train_batch_start on all ranks or on none, and in manual optimization run the backward pass of a zero "
        "loss (0 * loss) instead of skipping it."
    )
