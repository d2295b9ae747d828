"""The latest value of each rank, which ranks write and read without waiting for each other."""

import logging
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from lightning_paral.compat.torch.process_groups import default_store

_POLL_SECONDS = 0.01

log = logging.getLogger(__name__)


class LatestValues:
    """Strings of the ranks of the default process group, of which each rank can read the latest at any time.

    A rank that writes rarely, or never, does not make the others wait. If the store cannot be reached any more, because
    the process that serves it has ended, ranks read their own value only.

    All ranks create their objects with the same key in the same order. Without a process group, there is one rank.

    Args:
        key: a name; several objects may have the same one.
        num_ranks: the number of ranks that write.
    """

    def __init__(self, key: str, num_ranks: int) -> None:
        self.rank = dist.get_rank() if num_ranks > 1 else 0
        """The rank of this process."""
        self.num_ranks = num_ranks
        """The number of ranks that write."""
        self._own: str | None = None
        self._known: set[int] = set()
        self._store: Any = None
        if num_ranks > 1:
            store: Any = default_store()
            number = store.add(f"lightning_paral/{key}/created by {self.rank}", 1)
            # A clone, because a store serves one call at a time, and other threads may wait in another call.
            self._store = PrefixStore(f"lightning_paral/{key}/{number}", store.clone())

    def write(self, value: str) -> None:
        """Replace the value of this rank."""
        self._own = value
        if self._store is not None:
            try:
                self._store.set(str(self.rank), value)
            except (dist.DistError, RuntimeError) as error:
                self._give_up(error)

    def read(self, wait: timedelta | None = None) -> dict[int, str]:
        """Return the latest values by rank, in ascending order, of the ranks that have written one.

        Args:
            wait: how long to wait, at most, until all ranks have written a value. By default, not at all.
        """
        values = {} if self._own is None else {self.rank: self._own}
        if self._store is None:
            return values
        deadline = time.monotonic() + (wait.total_seconds() if wait is not None else 0.0)
        try:
            self._find_writers()
            while len(self._known) < self.num_ranks and time.monotonic() < deadline:
                time.sleep(_POLL_SECONDS)
                self._find_writers()
            others = sorted(self._known - {self.rank})
            if others:
                found = self._store.multi_get([str(rank) for rank in others])
                values |= {rank: value.decode() for rank, value in zip(others, found, strict=True)}
        except (dist.DistError, RuntimeError) as error:
            self._give_up(error)
        return dict(sorted(values.items()))

    def _find_writers(self) -> None:
        """Learn which ranks have written a value: `multi_get` would wait for the others."""
        missing = [rank for rank in range(self.num_ranks) if rank not in self._known]
        if not missing or self._store.check([str(rank) for rank in missing]):
            self._known.update(missing)
        else:
            self._known.update(rank for rank in missing if self._store.check([str(rank)]))

    def _give_up(self, error: Exception) -> None:
        log.debug("The store cannot be reached: %s", error)
        self._store = None

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle as `None`, because a connection belongs to one process."""
        return type(None), ()
