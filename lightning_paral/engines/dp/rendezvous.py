"""A barrier at which replicas wait for each other, so that one of them can make a call for all."""

import threading
from collections.abc import Callable
from typing import Any

from lightning_paral.errors import ConfigurationError


class RendezvousBrokenError(Exception):
    """Another replica failed and will not arrive."""


class Rendezvous:
    """Lets the replicas of one step, each in its own thread, run a function once for all of them.

    Args:
        num_replicas: how many replicas have to arrive.
    """

    def __init__(self, num_replicas: int) -> None:
        self._barrier = threading.Barrier(num_replicas)
        self._calls = [""] * num_replicas
        self._values: list[Any] = [None] * num_replicas
        self._running = False
        self._result: Any = None

    @property
    def is_running(self) -> bool:
        """Whether replica 0 is running a function for all."""
        return self._running

    def run_once(self, replica: int, call: str, value: Any, function: Callable[[list[Any]], Any]) -> Any:
        """Wait for all replicas; replica 0 runs `function`; return its result in all. *Collective* over the replicas.

        If `function` calls `run_once` itself, the inner function runs at once.

        Args:
            replica: the caller's number.
            call: name of the call; all replicas must pass the same.
            value: the caller's argument.
            function: takes the arguments of all replicas, in order.

        Raises:
            ConfigurationError: replicas arrived for different calls.
            RendezvousBrokenError: another replica failed.
        """
        if replica == 0 and self._running:
            return function([value])
        self._calls[replica], self._values[replica] = call, value
        self._wait()
        if len(set(self._calls)) > 1:
            raise ConfigurationError(
                f"The replicas of paral_dp diverged in training_step: {self._explain()}. Under manual "
                "optimization all of them have to make the same calls in the same order, whatever is in their part of "
                "the batch. Otherwise use paral_ddp."
            )
        if replica == 0:
            self._running = True
            try:
                self._result = function(list(self._values))
            finally:
                self._running = False
        self._wait()
        return self._result

    def abort(self) -> None:
        """Raise a `RendezvousBrokenError` in all replicas that wait, and in all that arrive later."""
        self._barrier.abort()

    def _wait(self) -> None:
        try:
            self._barrier.wait()
        except threading.BrokenBarrierError:
            raise RendezvousBrokenError("Another replica failed.") from None

    def _explain(self) -> str:
        return ", ".join(f"replica {replica} was at {call}" for replica, call in enumerate(self._calls))
