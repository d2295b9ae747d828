"""A barrier at which replicas wait for each other, so that one of them can call a function for all."""

import threading
from collections.abc import Callable
from typing import Any

from lightning_paral.errors import ConfigurationError


class RendezvousBrokenError(Exception):
    """Another replica failed and will not arrive."""


class Rendezvous:
    """Lets the replicas of one step, each in its own thread, run a function once for all of them.

    Args:
        num_replicas: the number of replicas, all of which must arrive.
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
        """Wait for all replicas, run `function` in replica 0, and return its result in all. *Collective* over replicas.

        If `function` calls `run_once` itself, the inner function runs at once.

        Args:
            replica: index of the calling replica.
            call: name of the call; must be the same in all replicas.
            value: the value of the calling replica.
            function: takes the values of all replicas, in order.

        Raises:
            ConfigurationError: the replicas arrived with different calls.
            RendezvousBrokenError: another replica failed.
        """
        if replica == 0 and self._running:
            return function([value])
        self._calls[replica], self._values[replica] = call, value
        self._wait()
        if len(set(self._calls)) > 1:
            raise ConfigurationError(
                f"The replicas of paral_dp diverged in training_step: {self._describe_calls()}. Under manual "
                "optimization all of them must make the same calls in the same order, whatever their samples are. "
                "If they cannot, use paral_ddp."
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

    def _describe_calls(self) -> str:
        return ", ".join(f"replica {replica} was at {call}" for replica, call in enumerate(self._calls))
