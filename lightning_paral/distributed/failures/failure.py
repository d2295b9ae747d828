"""The first failure of a run: what it was, on which rank, and how all ranks learn of it."""

import json
import os
import socket
import threading
import time
import traceback
from dataclasses import asdict, dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from lightning_paral.errors import RankFailedError

PRINT_SECONDS = 5.0
"""How long a rank that ended because of another one waits until that one has printed its error."""
CONSEQUENCE_SECONDS = 2.0
"""How long a rank whose collective was interrupted waits to learn of the failure that interrupted it."""

_INTERRUPTED = (
    "Connection closed by peer",
    "Connection was likely closed",
    "Connection reset by peer",
    "Broken pipe",
    "Socket closed",
    "Failed to recv",
    "Failed to send",
    "NCCL communicator was aborted",
    "ncclRemoteError",
    "ncclSystemError",
)


class InterruptedByFailure(BaseException):
    """Raised in Python code of the main thread when another rank has failed; reported as a `RankFailedError`.

    It is not an `Exception`, so that code which catches errors of a batch or of an import does not catch it.
    """


@dataclass(frozen=True, kw_only=True)
class Failure:
    """The end of a run on one rank: an error, or the death of the process."""

    rank: int
    node: str
    """The name of the rank's node; empty if it is unknown."""
    error: str
    """The type and message of the error, such as `ValueError: my bug`, or how the process ended."""
    where: str = ""
    """The part of the run, such as `training step 3 of fit`; empty if it is unknown."""
    traceback: str = ""
    """The formatted traceback; empty if no exception was raised."""
    has_died: bool = False
    """Whether the process ended without an exception, so that it can neither print nor save."""

    def __str__(self) -> str:
        """Return one line, such as `rank 1 (node-a) failed in training step 3 of fit: ValueError: my bug`."""
        node = f" ({self.node})" if self.node else ""
        where = f" in {self.where}" if self.where else ""
        return f"rank {self.rank}{node} {'died' if self.has_died else 'failed'}{where}: {self.error}"


def failure_of(error: BaseException, rank: int, where: str) -> Failure:
    """Return the failure that `error` means on this rank."""
    return Failure(
        rank=rank,
        node=socket.gethostname(),
        error=_one_line(_without_traceback("".join(traceback.format_exception_only(error)))),
        where=where,
        traceback="".join(traceback.format_exception(error)) if error.__traceback__ is not None else "",
    )


def message_of(error: BaseException) -> str:
    """Return the message of `error`; an empty string if its class fails to make one."""
    try:
        return str(error)
    except Exception:
        return ""


def is_interruption(error: BaseException | None) -> bool:
    """Return whether `error`, or an error that led to it, says that another rank left a collective."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        message = message_of(error)
        if isinstance(error, InterruptedByFailure | RankFailedError | dist.DistNetworkError) or (
            isinstance(error, RuntimeError) and any(sign in message for sign in _INTERRUPTED)
        ):
            return True
        error = error.__cause__ or error.__context__
    return False


def as_consequence(error: BaseException, why: str) -> BaseException:
    """Return a `RankFailedError` with the message `why` if another rank interrupted this one, otherwise `error`.

    Args:
        error: an error that ended the run on this rank.
        why: names the failure of the other rank; empty if no other rank has failed.
    """
    if not why or not is_interruption(error):
        return error
    consequence = RankFailedError(why)
    consequence.__cause__ = error
    return consequence


class FirstFailure:
    """The record in the store of the failure that ended a run. The first rank that writes it decides it for all.

    The methods may be called in any thread.

    Args:
        store: a store in a namespace of the run. Only this object uses its connection.
        rank: this process's rank.
    """

    def __init__(self, store: Store, rank: int) -> None:
        self.store: Any = store
        self.rank = rank
        self.is_printed = False
        """Whether this rank has printed the failure."""
        self._known: Failure | None = None
        self._known_event = threading.Event()

    @property
    def known(self) -> Failure | None:
        """The failure, if this rank knows of one."""
        return self._known

    @property
    def is_own(self) -> bool:
        """Whether this rank failed first."""
        return self._known is not None and self._known.rank == self.rank

    def why_ended(self) -> str:
        """Return one line that says why this rank ends, once the failure is known."""
        assert self._known is not None
        if self.is_own:
            return f"Rank {self.rank} ended: {self._known.error}"
        return f"Rank {self.rank} ended because {self._known}"

    def why_interrupted(self) -> str:
        """Return the same line if another rank ended the run, or this process died; otherwise an empty string."""
        return "" if self._known is None or (self.is_own and not self._known.has_died) else self.why_ended()

    def report(self, failure: Failure) -> Failure:
        """Record `failure` unless another one was recorded before, and return the recorded one."""
        if self._known is None:
            try:
                found = self.store.compare_set("failure", "", json.dumps(asdict(failure)))
                self._learn(Failure(**json.loads(found)))
            except (dist.DistError, RuntimeError):  # rank 0, which serves the store, has ended
                self._learn(failure)
        assert self._known is not None
        return self._known

    def check(self) -> Failure | None:
        """Return the failure that any rank has recorded; `None` if there is none.

        Raises:
            RuntimeError: the store cannot be reached, because the process that serves it has ended.
        """
        if self._known is None and self.store.check(["failure"]):
            self._learn(Failure(**json.loads(self.store.get("failure"))))
        return self._known

    def wait(self, seconds: float) -> Failure | None:
        """Wait until this rank knows of a failure, for at most `seconds`."""
        self._known_event.wait(seconds)
        return self._known

    def set_printed(self) -> None:
        """Tell the other ranks that this one has printed the failure."""
        self.is_printed = True
        try:
            self.store.set("printed", "")
        except (dist.DistError, RuntimeError):
            return

    def wait_until_printed(self, seconds: float) -> bool:
        """Wait for at most `seconds` until the failed rank has printed the traceback, which it does when it exits.

        Do not wait if the failure has no traceback, or if the process that serves the store has ended.

        Returns:
            bool: whether this rank has to print the traceback.
        """
        if self._known is None or not self._known.traceback:
            return False
        deadline = time.monotonic() + seconds
        try:
            while not self.store.check(["printed"]):
                if time.monotonic() > deadline:
                    return bool(self.store.compare_set("printed", "", str(os.getpid())) == str(os.getpid()).encode())
                time.sleep(0.05)
        except (dist.DistError, RuntimeError):  # rank 0, which served the store, has ended; the failed rank prints
            return False
        return False

    def vote(self, key: str, value: bool) -> None:
        """Set the vote of this rank on `key`."""
        self.store.set(f"{key}/{self.rank}" if value else f"{key}/no", "")

    def all_vote(self, key: str, world_size: int, seconds: float) -> bool:
        """Return whether all ranks vote for `key` within `seconds`.

        Raises:
            RuntimeError: the store cannot be reached.
        """
        deadline = time.monotonic() + seconds
        while not self.store.check([f"{key}/{rank}" for rank in range(world_size)]):
            if time.monotonic() > deadline or self.store.check([f"{key}/no"]):
                return False
            time.sleep(0.05)
        return True

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle as `None`, because a connection belongs to one process."""
        return type(None), ()

    def _learn(self, failure: Failure) -> None:
        self._known = failure
        self._known_event.set()


def mark_as_told(error: BaseException) -> None:
    """Mark `error` as one that another rank raised and this one only repeats."""
    error.__dict__["paral_is_told"] = True


def is_told(error: BaseException) -> bool:
    """Return whether `error` repeats the error of another rank, so that its traceback does not show the cause."""
    return bool(getattr(error, "paral_is_told", False))


def remember_first(error: BaseException, first: FirstFailure) -> None:
    """Attach `first` to the error that ends this rank, for the function that prints uncaught errors."""
    error.__dict__["paral_first_failure"] = first


def first_failure_of(error: BaseException) -> FirstFailure | None:
    """Return the first failure of the run that `error` ended on this rank; `None` if `error` ended no run."""
    first = getattr(error, "paral_first_failure", None)
    return first if isinstance(first, FirstFailure) else None


def _without_traceback(text: str) -> str:
    """Return `text` without the traceback that torch puts into the messages of errors of loader workers."""
    before, is_there, after = text.partition("Original Traceback (most recent call last):\n")
    lines = after.splitlines()
    frames = [number for number, line in enumerate(lines) if line.startswith("  File ")]
    error = next((i for i in range(frames[-1], len(lines)) if not lines[i].startswith(" ")), None) if frames else None
    return text if not is_there or error is None else "\n".join([before, *lines[error:]])


def _one_line(text: str) -> str:
    return " ".join(text.split())
