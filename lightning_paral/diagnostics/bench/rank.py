"""What a benchmark knows in a rank: its number, and a store through which it reports to the command."""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

RESULT, ERROR, NUM_ERRORS, PROGRESS, DONE, TURN = "result", "error", "num_errors", "progress", "done", "turn"
"""Keys of the store, to which numbers are added."""


@dataclass(frozen=True, kw_only=True)
class Rank:
    """A process of a benchmark."""

    rank: int
    world_size: int
    store: Store | None
    """The store of the command that started this process; `None` if another launcher did."""
    timeout: timedelta
    """How long to wait for other ranks, or for a turn."""

    def join_group(self, backend: str = "gloo") -> dist.ProcessGroup:
        """Create the default process group, and return it. *Collective* over all ranks."""
        dist.init_process_group(
            backend, rank=self.rank, world_size=self.world_size, init_method="env://", timeout=self.timeout
        )
        assert dist.group.WORLD is not None
        return dist.group.WORLD

    def show_progress(self, text: str) -> None:
        """Show a few words on what is being measured, on a terminal. Only rank 0 shows them."""
        if self.rank == 0 and self.store is not None:
            self.store.set(PROGRESS, text)

    def wait_for_turn(self, number: int) -> bool:
        """Wait until the command gives turn `number` to these ranks. Return whether it is the last.

        In its last turn, a rank measures nothing and ends.
        """
        assert self.store is not None
        self.store.wait([f"{TURN}/{number}"], self.timeout)
        return bool(self.store.get(f"{TURN}/{number}") == b"last")

    def end_turn(self, number: int, result: Any) -> None:
        """Report a result, which JSON can hold, at the end of turn `number`."""
        assert self.store is not None
        self.store.set(f"{DONE}/{number}/{self.rank}", json.dumps(result))


Benchmark = Callable[..., Any]
"""A function that runs on every rank: `function(rank, **arguments)` returns a result that JSON can hold."""


def rank_of_launcher(timeout: timedelta) -> Rank | None:
    """Return this process's rank if torchrun or another launcher has set it; `None` if none has."""
    if not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        return None
    return Rank(rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]), store=None, timeout=timeout)
