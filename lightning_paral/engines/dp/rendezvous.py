"""Where replicas wait for each other, so that one of them can act for all."""

import threading
from collections.abc import Callable
from typing import Any

from lightning_paral.errors import ConfigurationError


class MeetingEndedError(Exception):
    """Another replica failed, and will not come."""


class Meeting:
    """A rendezvous of the replicas of one step, each in its thread.

    Args:
        num_replicas: how many have to come.
    """

    def __init__(self, num_replicas: int) -> None:
        self._barrier = threading.Barrier(num_replicas)
        self._subjects = [""] * num_replicas
        self._brought: list[Any] = [None] * num_replicas
        self._acting = False
        self._result: Any = None

    @property
    def is_acting(self) -> bool:
        """Whether replica 0 acts for all."""
        return self._acting

    def meet(self, replica: int, subject: str, brought: Any, act: Callable[[list[Any]], Any]) -> Any:
        """Wait for all replicas, let replica 0 call `act` with what each brought, and return its result. *Collective*.

        What `act` itself calls may call `meet`, which then acts at once: it is already for all.

        Args:
            replica: the caller's number.
            subject: what the replicas meet for.
            brought: the caller's contribution.
            act: takes the contributions in order.

        Raises:
            ConfigurationError: replicas came for different subjects.
            MeetingEndedError: another replica failed.
        """
        if replica == 0 and self._acting:
            return act([brought])
        self._subjects[replica], self._brought[replica] = subject, brought
        self._wait()
        if len(set(self._subjects)) > 1:
            raise ConfigurationError(
                f"The replicas of paral_dp took different ways through training_step: {self._explain()}. Under manual "
                "optimization all of them have to make the same calls in the same order, whatever is in their part of "
                "the batch. Use paral_ddp where that cannot be."
            )
        if replica == 0:
            self._acting = True
            try:
                self._result = act(list(self._brought))
            finally:
                self._acting = False
        self._wait()
        return self._result

    def end(self) -> None:
        """Release all who wait, and all who come later, with an error."""
        self._barrier.abort()

    def _wait(self) -> None:
        try:
            self._barrier.wait()
        except threading.BrokenBarrierError:
            raise MeetingEndedError("Another replica failed.") from None

    def _explain(self) -> str:
        return ", ".join(f"replica {replica} was at {subject}" for replica, subject in enumerate(self._subjects))
