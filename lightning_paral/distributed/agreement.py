"""Run a function on the ranks of a group. If it fails on one of them, raise the error on all."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist

from lightning_paral.distributed.failure import mark_as_told
from lightning_paral.distributed.host_exchange import gather_objects
from lightning_paral.errors import CheckpointError, MissingCheckpointError, ParalError

T = TypeVar("T")


@dataclass(frozen=True)
class RankGroup:
    """A process group and this process's rank in it. All its ranks must call the same methods in the same order."""

    rank: int = 0
    world_size: int = 1
    group: Any = None
    """The process group; `None` for the default group, or for a single process without one."""

    @property
    def is_rank_0(self) -> bool:
        """Whether this process is rank 0 of the group."""
        return self.rank == 0

    def gather(self, value: T) -> list[T]:
        """Return the value of each rank, ordered by rank. Values must be picklable. *Collective*."""
        if self.world_size == 1:
            return [value]
        return gather_objects(value, self.group)

    def broadcast(self, value: T, source: int) -> T:
        """Return the `value` that rank `source` of this group passes. It must be picklable. *Collective*."""
        if self.world_size == 1:
            return value
        values = [value if self.rank == source else None]
        rank = source if self.group is None else dist.get_global_rank(self.group, source)
        dist.broadcast_object_list(values, src=rank, group=self.group)
        return values[0]  # type: ignore[return-value]

    def gather_results(self, what: str, action: Callable[[], T]) -> list[T]:
        """Run `action` on all ranks and return the results, ordered by rank. *Collective*.

        Args:
            what: a name for the action, with which the error message begins.
            action: returns a picklable value.

        Raises:
            CheckpointError: `action` raised on at least one rank. All ranks raise the error of the first of these.
        """
        outcome: T | None = None
        error: BaseException | None = None
        try:
            outcome = action()
        except Exception as raised:
            error = raised
        missing = isinstance(error, MissingCheckpointError)
        outcomes = self.gather((None if error is None else explain(error), missing, outcome))
        failed = {rank: outcomes[rank][:2] for rank in range(self.world_size) if outcomes[rank][0] is not None}
        if failed:
            rank, (message, missing) = next(iter(failed.items()))
            where = f" on rank {rank} of {self.world_size}" if self.world_size > 1 else ""
            error_type = MissingCheckpointError if missing else CheckpointError
            agreed = error_type(f"{what} failed{where}: {message}")
            if error is None:
                mark_as_told(agreed)
            raise agreed from error
        return [value for *_, value in outcomes]  # type: ignore[misc]

    def run_on_all(self, what: str, action: Callable[[], T]) -> T:
        """Run `action` on all ranks and return this rank's result. Only errors are exchanged. *Collective*.

        Raises:
            CheckpointError: `action` raised on at least one rank. All ranks raise the error of the first of these.
        """
        own: list[T] = []
        self.gather_results(what, lambda: own.append(action()))
        return own[0]

    def run_on_rank_0(self, what: str, action: Callable[[], T]) -> T:
        """Run `action` on rank 0 only and return its result on all ranks. *Collective*.

        Raises:
            CheckpointError: `action` raised. All ranks raise its error.
        """
        return self.gather_results(what, lambda: action() if self.is_rank_0 else None)[0]  # type: ignore[return-value]


def all_ranks(group: Any = None) -> RankGroup:
    """Return `group`, or the default group, as a `RankGroup`. Without a process group, return this process alone."""
    if not dist.is_initialized():
        return RankGroup()
    return RankGroup(dist.get_rank(group), dist.get_world_size(group), group)


def explain(error: BaseException) -> str:
    """Return the message of `error`, preceded by its type unless it is a `ParalError`."""
    return str(error) if isinstance(error, ParalError) else f"{type(error).__name__}: {error}"
