"""The ranks that save and load together, and how they tell each other what went wrong."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist

from lightning_paral.errors import CheckpointError, MissingCheckpointError, ParalError

T = TypeVar("T")


@dataclass(frozen=True)
class RankGroup:
    """This rank, and the process group whose members all call the same functions."""

    rank: int = 0
    world_size: int = 1
    group: Any = None

    @property
    def is_first(self) -> bool:
        """Whether this rank does what is done once."""
        return self.rank == 0

    def gather(self, value: T) -> list[T]:
        """Return every rank's `value`, by rank. *Collective*."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def broadcast(self, value: T, source: int) -> T:
        """Return the `value` of rank `source` of this group. *Collective*."""
        if self.world_size == 1:
            return value
        values = [value if self.rank == source else None]
        rank = source if self.group is None else dist.get_global_rank(self.group, source)
        dist.broadcast_object_list(values, src=rank, group=self.group)
        return values[0]  # type: ignore[return-value]

    def agree(self, what: str, action: Callable[[], T]) -> list[T]:
        """Run `action` on all ranks and return what each returned. *Collective*.

        Raises:
            CheckpointError: `action` raised on any rank; on all ranks, with the first of those errors.
        """
        outcome: T | None = None
        error: BaseException | None = None
        try:
            outcome = action()
        except Exception as raised:
            error = raised
        missing = isinstance(error, MissingCheckpointError)
        told = self.gather((None if error is None else explain(error), missing, outcome))
        failed = {rank: told[rank][:2] for rank in range(self.world_size) if told[rank][0] is not None}
        if failed:
            rank, (message, missing) = next(iter(failed.items()))
            where = f" on rank {rank} of {self.world_size}" if self.world_size > 1 else ""
            kind = MissingCheckpointError if missing else CheckpointError
            raise kind(f"{what} failed{where}: {message}") from error
        return [value for *_, value in told]  # type: ignore[misc]

    def each(self, what: str, action: Callable[[], T]) -> T:
        """Run `action` on all ranks and return what it returned here; only errors travel. *Collective*.

        Raises:
            CheckpointError: `action` raised on any rank; on all ranks.
        """
        own: list[T] = []
        self.agree(what, lambda: own.append(action()))
        return own[0]

    def on_first(self, what: str, action: Callable[[], T]) -> T:
        """Run `action` on rank 0 only, and return there and everywhere what it returned. *Collective*."""
        return self.agree(what, lambda: action() if self.is_first else None)[0]  # type: ignore[return-value]


def all_ranks(group: Any = None) -> RankGroup:
    """Return the ranks of `group`, or of the run; this process alone where there is no process group."""
    if not dist.is_initialized():
        return RankGroup()
    return RankGroup(dist.get_rank(group), dist.get_world_size(group), group)


def explain(error: BaseException) -> str:
    """Return what happened in one line: our own messages as they are, others with their type."""
    return str(error) if isinstance(error, ParalError) else f"{type(error).__name__}: {error}"
