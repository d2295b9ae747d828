"""Exchange strings through the store of the default process group.

Unlike a collective, an exchange does not hang if some ranks do not take part, and it shows which of them did.
"""

import time
from collections.abc import Iterable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from lightning_paral.compat.torch.process_groups import default_store
from lightning_paral.errors import ProcessGroupError

_WAIT = timedelta(seconds=0.5)
"""How long a call of the store waits at most, because the main thread cannot be interrupted in it."""


def exchange_in_store(key: str, value: str, timeout: timedelta, ranks: Iterable[int] | None = None) -> dict[int, str]:
    """Return, by global rank, the values of the ranks that call this with the same `key` within `timeout`.

    Args:
        key: a name for the exchange, which this process group has not used before.
        value: the value of this rank.
        timeout: how long to wait for the other ranks.
        ranks: the global ranks to wait for; all ranks by default.

    Raises:
        RuntimeError: the store cannot be reached, because the process that serves it has ended.
    """
    store: Any = default_store()
    keys = {
        rank: f"lightning_paral/{key}/{rank}" for rank in (range(dist.get_world_size()) if ranks is None else ranks)
    }
    store.set(keys[dist.get_rank()], value)
    with suppress(dist.DistError, RuntimeError):
        store.wait(list(keys.values()), timeout)
    return {rank: store.get(each).decode() for rank, each in keys.items() if store.check([each])}


class SequenceOfRankZero:
    """A sequence of strings of rank 0 that the other ranks read, in which each rank is at a position of its own.

    All ranks create their sequences with the same key in the same order.

    Args:
        key: a name for the sequence; several sequences may have the same one.
        timeout: how long to wait for rank 0 at each position.
    """

    def __init__(self, key: str, timeout: timedelta) -> None:
        self._store: Any = default_store()
        self._timeout = timeout
        self.rank = dist.get_rank()
        """The rank of this process."""
        self._has_others = dist.get_world_size() > 1
        number = self._store.add(f"lightning_paral/{key}/sequences of {self.rank}", 1)
        self._key = f"lightning_paral/{key}/{number}"
        self._length = 0

    def next(self, value: str) -> str:
        """Return what rank 0 gives at the next position; on rank 0, give `value`. The other ranks wait for rank 0.

        Raises:
            ProcessGroupError: rank 0 did not reach this position within `timeout`.
            RuntimeError: the store cannot be reached, because the process that serves it has ended.
        """
        key = f"{self._key}/{self._length}"
        self._length += 1
        if self.rank == 0:
            if self._has_others:
                self._store.set(key, value)
            return value
        deadline = time.monotonic() + self._timeout.total_seconds()
        while not self._store.check([key]):
            if time.monotonic() > deadline:
                raise ProcessGroupError(
                    f"Rank 0 did not reach the same place within timeout={self._timeout}. Rank {self.rank} {value}. "
                    "Look for an error of rank 0, and for code that only some ranks run. If rank 0 is only slow, raise "
                    "the timeout."
                )
            with suppress(RuntimeError):  # after `_WAIT`; if the store cannot be reached, `check` raises this again
                self._store.wait([key], _WAIT)
        return str(self._store.get(key).decode())
