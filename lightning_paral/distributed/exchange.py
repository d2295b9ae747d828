"""Host collectives: small values that ranks exchange at a place that all of them reach, and what they conclude.

Values go through host memory, so no rank waits for a device. For what must be heard while a main thread is stuck, see
`watcher`.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_paral.compat.torch.tensors import tree_leaves
from lightning_paral.distributed.failure import mark_as_told
from lightning_paral.errors import CheckpointError, ConfigurationError, MissingCheckpointError, ParalError

Facts = Mapping[tuple[str, str], str]
"""What must be equal: a value for each subject and verb, such as ``("`head.weight`", "has shape"): "(10, 8)"``."""

_MANY = 8
_LONG = 200

T = TypeVar("T")


# Collectives


def any_rank(flag: bool, group: dist.ProcessGroup | None = None) -> bool:
    """Return whether `flag` is true on any rank of `group`. *Collective* over `group`."""
    return 1 in gather_ints(int(flag), group)


def every_rank(flag: bool, group: dist.ProcessGroup | None = None) -> bool:
    """Return whether `flag` is true on every rank of `group`. *Collective* over `group`."""
    return 0 not in gather_ints(int(flag), group)


def gather_ints(number: int, group: dist.ProcessGroup | None = None) -> list[int]:
    """Return the `number` of each rank of `group`, ordered by rank. *Collective* over `group`."""
    return [number for (number,) in gather_int_lists([number], group)]


def gather_int_lists(numbers: Sequence[int], group: dist.ProcessGroup | None = None) -> list[list[int]]:
    """Return the `numbers` of each rank of `group`, ordered by rank, in one collective. *Collective* over `group`.

    All ranks must give the same number of 64-bit integers.
    """
    local = torch.tensor(numbers, dtype=torch.int64, device="cpu")
    gathered = [torch.zeros_like(local) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, local, group=group)
    return torch.stack(gathered).tolist()


def gather_objects(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return the value of each rank of `group`, ordered by rank. *Collective* over `group`.

    Values must be picklable. Without a process group, return this process's value only.
    """
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def broadcast_from_first_rank(value: T, group: dist.ProcessGroup | None = None) -> T:
    """Return the `value` that rank 0 of `group` passes. It must be picklable. *Collective* over `group`."""
    shared = [value]
    dist.broadcast_object_list(shared, group_src=0, group=group)
    return shared[0]


# Errors that all ranks raise together


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
        return [value] if self.world_size == 1 else gather_objects(value, self.group)

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
        for rank, (message, missing, _) in enumerate(outcomes):
            if message is not None:
                where = f" on rank {rank} of {self.world_size}" if self.world_size > 1 else ""
                agreed = (MissingCheckpointError if missing else CheckpointError)(f"{what} failed{where}: {message}")
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


# Differences


def check_same(facts: Facts, remedy: str, group: dist.ProcessGroup | None = None) -> None:
    """Check that the ranks of `group` have equal facts, in the same order. *Collective* over `group`.

    Only a digest is exchanged, unless they differ.

    Args:
        facts: the facts of this rank.
        remedy: what the user can do if they differ; ends the message.
        group: the ranks that must agree; `None` for all ranks.

    Raises:
        ConfigurationError: the facts differ. The message names the first difference and the ranks. It is raised on all
            ranks of `group`.
    """
    if len(set(gather_ints(digest_of(list(facts.items())), group))) == 1:
        return
    ranks = list(range(dist.get_world_size())) if group is None else dist.get_process_group_ranks(group)
    by_rank = dict(zip(ranks, gather_objects(dict(facts), group), strict=True))
    raise ConfigurationError(f"{first_difference(by_rank)}. {remedy}")


def check_same_batch(step: str, batch: Any, ranks: str, group: dist.ProcessGroup) -> None:
    """Check that all ranks of `group` have the same batch, which they compute together. *Collective* over `group`.

    Args:
        step: the name of the step that runs on it.
        batch: the batch of this rank.
        ranks: what the ranks are called.
        group: the ranks.

    Raises:
        ConfigurationError: they do not. Raised on all ranks of `group`.
    """
    digest = hashlib.blake2b()
    for tensor in (leaf.detach().cpu() for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)):
        digest.update(str((tensor.shape, tensor.dtype)).encode())
        if tensor.layout is torch.strided and tensor.numel():
            digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    if len(set(gather_ints(digest_of(digest.digest()), group))) > 1:
        raise ConfigurationError(
            f"{ranks} have different batches in the first {step}, but they compute it together. Leave out samplers "
            "that divide the samples by rank, such as DistributedSampler: the strategy divides them among the ranks "
            "that draw different samples. Data that is random must be the same on all ranks: call seed_everything() "
            "first, or give it a generator with a seed."
        )


def digest_of(value: Any) -> int:
    """Return a 64-bit digest of the `repr` of `value`, equal in all processes that have an equal `value`."""
    digest = hashlib.blake2b(repr(value).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def first_difference(by_rank: Mapping[int, Facts]) -> str:
    """Return a clause that names the first difference, such as `max_epochs is 2 on rank 0 and 4 on rank 1`."""
    subjects_by_rank = {rank: {subject for subject, _ in facts} for rank, facts in by_rank.items()}
    for subject, verb in dict.fromkeys(chain.from_iterable(by_rank.values())):
        having = [rank for rank, subjects in subjects_by_rank.items() if subject in subjects]
        if len(having) < len(by_rank):
            return f"{subject} exists on {name_ranks(having)} only"
        values = {rank: facts.get((subject, verb), "not set") for rank, facts in by_rank.items()}
        if len(set(values.values())) > 1:
            return f"{subject} {verb} {values_by_rank(values)}"
    for keys in zip(*by_rank.values(), strict=True):
        if len(set(keys)) > 1:
            firsts = {rank: subject for rank, (subject, _) in zip(by_rank, keys, strict=True)}
            return f"The order differs: the first one that differs is {values_by_rank(firsts)}"
    raise ValueError("The facts do not differ.")


def values_by_rank(values: Mapping[int, str]) -> str:
    """Return the values with the ranks that have them, such as `2 on ranks 0, 2 and 4 on rank 1`."""
    ranks: dict[str, list[int]] = {}
    for rank, value in values.items():
        ranks.setdefault(value, []).append(rank)
    short = {value: value if len(value) <= _LONG else f"{value[:_LONG]}..." for value in ranks}
    found = [f"{short[value]} on {name_ranks(having)}" for value, having in list(ranks.items())[:_MANY]]
    found += ["..."] * (len(ranks) > _MANY)
    return f"{', '.join(found[:-1])} and {found[-1]}" if len(found) > 1 else found[0]


def name_ranks(ranks: Iterable[int]) -> str:
    """Return `rank 1`, or `ranks 0, 2 to 5`; of many separate ranks, the first ones. `ranks` are in ascending order."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    texts = [f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    count = sum(map(len, runs))
    more = f", ... ({count} ranks)" if len(texts) > _MANY else ""
    return f"rank{'s' * (count != 1)} {', '.join(texts[:_MANY])}{more}"
