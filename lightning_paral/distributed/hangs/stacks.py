"""Ask all ranks where they are: on a signal, and shortly before a collective times out."""

import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from lightning_paral.distributed.hangs.frames import frames_of
from lightning_paral.distributed.hangs.position_sampler import PositionSampler
from lightning_paral.distributed.hangs.positions import fold_stack
from lightning_paral.distributed.hangs.stack_signal import call_on_stack_signal
from lightning_paral.distributed.hangs.store_guard import StoreGuard
from lightning_paral.distributed.hangs.summary import Answer, summarize

ANSWER_SECONDS = 3.0
"""How long the ranks that log the summary wait at most for the answers of the others."""

_SUMMARY_SECONDS = 1.5
"""How long a rank whose collective timed out waits for the summary before it tells the others that it failed."""
_SAME_HANG_SECONDS = 10.0
"""After a request, how long a rank does not ask by itself: several ranks wait for the same one."""

log = logging.getLogger(__name__)


class StackRequests:
    """A topic of the watcher: any rank asks, and every rank logs its stack and tells the others where it is.

    The lowest rank that answers logs a summary. A rank asks by itself if it has waited for other ranks for nearly the
    timeout, because all ranks are still where they hang then: once the collective has failed, they are not.

    Args:
        timeout: the timeout of collectives.
        option: the name of the option that sets it.
        progress: a function that returns a number which changes at least once per batch.
        takes_signal: whether to ask when this process receives SIGUSR2.
    """

    def __init__(
        self,
        timeout: timedelta,
        option: str,
        progress: Callable[[], int],
        *,
        takes_signal: bool = True,
    ) -> None:
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self._timeout, self._option = timeout, option
        seconds = timeout.total_seconds()
        before = min(5.0, 0.4 * seconds)
        self._ask_after = seconds - before
        self._patience = min(ANSWER_SECONDS, max(1.5, before - 1.0))
        self._sampler = PositionSampler(progress)
        self._reason = ""
        self._round = 0
        """The number of the last request that this rank has answered."""
        self._answered_at = 0.0
        self.summary = ""
        """Why that request was made, and where the ranks are."""
        self._asked_since: float | None = None
        """The beginning of the wait for which this rank has asked."""
        self._summarized = threading.Event()
        self._summarized.set()
        self._num_polls = 0
        self._is_lost = False
        """Whether the process that serves the store has ended."""
        self._guard = StoreGuard(lambda: self._num_polls, self._patience_of_guard, self._describe)
        asks = partial(self.ask, f"SIGUSR2 reached rank {self._rank}.")
        self._release_signal = call_on_stack_signal(asks) if takes_signal else lambda: None

    def ask(self, reason: str) -> None:
        """Ask all ranks at the next poll. `reason` is the first line of the summary."""
        self._summarized.clear()
        self.summary, self._reason = "", reason

    def where_all_are(self, reason: str) -> str:
        """Ask all ranks where they are, and return `reason` with the answer. Do not call this in the watcher's thread.

        Waits for the answers, for some seconds.
        """
        self.ask(reason)
        self._summarized.wait(ANSWER_SECONDS)
        return self.summary or reason

    def name_timeout(self) -> None:
        """Ask where the ranks were before a collective failed, unless they have just answered.

        Waits for the summary, for a short time, because the other ranks still have to learn of the failure.
        """
        self._sampler.freeze()
        if not self._has_just_answered:
            self.ask(f"A collective of rank {self._rank} did not finish within {self._describe_timeout()}.")
        self._summarized.wait(_SUMMARY_SECONDS)

    def freeze(self) -> None:
        """Let this rank answer from now on where it was until now, because an error ends its part in the run."""
        self._sampler.freeze()

    def end(self) -> None:
        """Release the signal and the thread."""
        self._guard.end()
        self._sampler.end()
        if self._sampler.is_frozen:
            self._guard.end_stopped_launcher()
        self._release_signal()

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle as `None`, because a thread belongs to one process."""
        return type(None), ()

    @property
    def _has_just_answered(self) -> bool:
        return self._round > 0 and time.monotonic() - self._answered_at < _SAME_HANG_SECONDS

    def _patience_of_guard(self) -> float:
        """Return for how many seconds the store may be silent."""
        # After an error the main thread needs the store to end the run. Before, the collective may still time out.
        return 0.0 if self._sampler.is_frozen else self._timeout.total_seconds() + 5.0

    def _describe(self) -> str:
        """Return where this rank is, for the message of the guard."""
        where = Answer.of(self._sampler.sample).sentence(1)
        return f"Rank {self._rank} of {self._world_size}, which ends now, {where} ({self._describe_timeout()})."

    # Called by the watcher's thread

    def poll(self, store: Store) -> None:
        """Ask if there is a reason, answer requests, and log the summary of the last one."""
        if self._is_lost:
            return
        try:
            if self._num_polls == 0:
                self._introduce(store)
            self._exchange(store)
        except Exception:
            # If the connection is closed, no later call can succeed, and torch would print a long warning at each one.
            # After any other error the watcher does not poll this topic again, so the guard must not wait for polls.
            self._is_lost = True
            self._guard.end()
            self._summarized.set()
            raise
        self._num_polls += 1

    def _exchange(self, store: Any) -> None:
        self._find_reason()
        asked = int(store.add("stacks/asked", 0))
        if self._reason:
            reason, self._reason = self._reason, ""
            if asked == self._round:
                self._post_request(store, asked, reason)
            asked = int(store.add("stacks/asked", 0))
        if asked > self._round:
            self._answer(store, asked)
        if not self._summarized.is_set():
            self._summarize(store)

    def _introduce(self, store: Any) -> None:
        """Find out whether rank 0 started this process."""
        if self._rank == 0:
            store.set("stacks/rank 0", f"{os.getpid()} on {socket.gethostname()}")
            return
        parent = os.getppid()
        with suppress(dist.DistStoreError):  # rank 0 takes longer
            store.wait(["stacks/rank 0"], timedelta(seconds=5))
            if store.get("stacks/rank 0").decode() == f"{parent} on {socket.gethostname()}":
                self._guard.launcher = parent

    def _find_reason(self) -> None:
        sample = self._sampler.sample
        if sample is None or not sample.position.waits_for_ranks:
            return
        waited = time.monotonic() - sample.still_since
        if waited > self._ask_after and sample.still_since != self._asked_since and not self._sampler.is_frozen:
            self._asked_since = sample.still_since
            if not self._has_just_answered:
                self.ask(
                    f"Rank {self._rank} has waited for {waited:.0f} s, and gives up after {self._describe_timeout()}."
                )

    def _describe_timeout(self) -> str:
        return f"timeout={self._timeout}, set by `{self._option}`"

    def _post_request(self, store: Any, asked: int, reason: str) -> None:
        """Ask, unless another rank has asked at the same time."""
        store.compare_set(f"stacks/{asked + 1}/reason", "", reason)
        store.compare_set("stacks/asked", str(asked), str(asked + 1))

    def _answer(self, store: Any, asked: int) -> None:
        self._round, self._answered_at = asked, time.monotonic()
        self._summarized.clear()
        self._sampler.take()
        answer = Answer.of(self._sampler.sample)
        store.set(f"stacks/{asked}/{self._rank}", answer.as_text())
        frames = frames_of(self._sampler.thread)
        if frames and not self._sampler.is_frozen:
            who = f"Rank {self._rank} of {self._world_size} (process {os.getpid()} on {socket.gethostname()})"
            log.warning("%s %s:\n%s", who, answer.sentence(1), fold_stack(frames).rstrip())

    def _summarize(self, store: Any) -> None:
        """Log the summary if all have answered or the time is up, and this is the rank that has to log it."""
        if self._answered_at == 0.0 or self._round == 0:
            return
        prefix = f"stacks/{self._round}"
        waited = time.monotonic() - self._answered_at
        present = [rank for rank in range(self._world_size) if store.check([f"{prefix}/{rank}"])]
        if len(present) < self._world_size and waited < self._patience:
            return
        answers = {rank: Answer.from_text(store.get(f"{prefix}/{rank}").decode()) for rank in present}
        reason = store.get(f"{prefix}/reason").decode()
        self.summary = f"{reason} {summarize(answers, self._world_size)}"
        if self._rank != min(present, default=self._rank) and waited < self._patience + 1.0:
            if store.check([f"{prefix}/logged"]):
                self._summarized.set()
            return
        number = str(self._rank)
        if store.compare_set(f"{prefix}/logged", "", number) == number.encode():
            log.warning("%s", self.summary)
        self._summarized.set()
