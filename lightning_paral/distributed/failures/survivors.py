"""Agree after a failure on the ranks that save a checkpoint together, without the ranks that died.

Ranks that live meet through the store, because collectives would wait for those that died. The first rank that writes
the outcome decides it for all.
"""

import json
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta

import torch.distributed as dist

from lightning_paral.compat.torch.group_names import new_named_group
from lightning_paral.compat.torch.process_groups import default_store
from lightning_paral.distributed.exchange import name_ranks

_POLL_SECONDS = 0.05


@dataclass(frozen=True, kw_only=True)
class StepPosition:
    """The last completed optimizer step of a rank, to which a checkpoint belongs."""

    epoch: int = 0
    """The number of epochs that have started."""
    batch: int = 0
    """The number of batches of the epoch that are part of completed steps."""
    step: int = 0
    """The number of completed optimizer steps."""
    is_complete: bool = True
    """Whether the rank has all values of this step, and none of the next. `False` inside an optimizer step."""

    def __str__(self) -> str:
        where = "at" if self.is_complete else "inside the optimizer step after"
        return f"{where} step {self.step} (batch {self.batch} of epoch {max(0, self.epoch - 1)})"


@dataclass(frozen=True, kw_only=True)
class Savers:
    """The ranks that save together after a failure."""

    ranks: tuple[int, ...] = ()
    """Global ranks in ascending order; empty if no rank can save."""
    missing: tuple[int, ...] = ()
    """Global ranks whose shards none of `ranks` has."""
    reason: str = ""
    """Why ranks are missing or cannot save, for messages; empty if all ranks save."""


def find_survivors(
    run: str, position: StepPosition, patience: timedelta, dead: Callable[[], Collection[int]] = tuple
) -> dict[int, StepPosition]:
    """Return the positions of the ranks that call this within `patience`, by global rank; the same on all of them.

    Args:
        run: the name of the failed run, equal on all ranks.
        position: the position of this rank.
        patience: how long to wait for the other ranks.
        dead: returns the global ranks that are known to have died, which are not waited for.

    Returns:
        dict[int, StepPosition]: it does not contain this rank if this rank came too late.

    Raises:
        RuntimeError: the store cannot be reached, because the process that serves it has ended.
    """
    store = default_store()
    keys = {rank: f"lightning_paral/failed/{run}/{rank}" for rank in range(dist.get_world_size())}
    store.set(keys[dist.get_rank()], json.dumps(asdict(position)))
    deadline = time.monotonic() + patience.total_seconds()
    while time.monotonic() < deadline:
        gone = dead()
        if store.check([key for rank, key in keys.items() if rank not in gone or rank == dist.get_rank()]):
            break
        time.sleep(_POLL_SECONDS)
    present = {rank: store.get(key).decode() for rank, key in keys.items() if store.check([key])}
    outcome = store.compare_set(f"lightning_paral/failed/{run}/outcome", "", json.dumps(present))
    return {int(rank): StepPosition(**json.loads(found)) for rank, found in sorted(json.loads(outcome).items())}


def choose_savers(positions: Mapping[int, StepPosition], shards: Sequence[int]) -> Savers:
    """Return the ranks that save together: they have the same position, the latest one at which all shards are there.

    If there is no such position, return the ranks at the latest one. They may still save tensors that all ranks have.

    Args:
        positions: the positions of the ranks that live, by global rank.
        shards: for each global rank, a number that is equal on the ranks that have the same shards.
    """
    by_position: dict[tuple[int, int, int], list[int]] = {}
    for rank, position in sorted(positions.items()):
        if position.is_complete:
            by_position.setdefault((position.step, position.epoch, position.batch), []).append(rank)
    if not by_position:
        return Savers(missing=tuple(range(len(shards))), reason=_explain(positions, len(shards)))
    found = [
        Savers(
            ranks=tuple(ranks),
            missing=tuple(rank for rank, shard in enumerate(shards) if shard not in {shards[each] for each in ranks}),
            reason="" if len(ranks) == len(shards) else _explain(positions, len(shards)),
        )
        for _, ranks in sorted(by_position.items(), reverse=True)
    ]
    return next((savers for savers in found if not savers.missing), found[0])


def _explain(positions: Mapping[int, StepPosition], world_size: int) -> str:
    """Return what is known of each rank, in one line."""
    ended = [rank for rank in range(world_size) if rank not in positions]
    parts = [f"{name_ranks(ended)} of {world_size} ended or did not answer"] if ended else []
    if len(set(positions.values())) > 1 or not all(position.is_complete for position in positions.values()):
        parts += [
            f"{name_ranks([rank for rank in positions if positions[rank] == position])}: {position}"
            for position in dict.fromkeys(positions.values())
        ]
    return ", ".join(parts)


def make_group(run: str, ranks: Sequence[int], timeout: timedelta) -> dist.ProcessGroup | None:
    """Return a new gloo group of `ranks`, made without the other ranks. *Collective* over `ranks`.

    A single rank needs none, and gets `None`.

    Args:
        run: the name of the failed run, equal on all ranks.
        ranks: the global ranks.
        timeout: the timeout of collectives in the group.
    """
    if len(ranks) < 2:
        return None
    return new_named_group(f"after the failure of {run}, ranks {ranks}", ranks, timeout=timeout, backend="gloo")


def wait_for_savers(
    run: str,
    rank: int,
    savers: Sequence[int],
    patience: timedelta,
    dead: Callable[[], Collection[int]] = tuple,
) -> None:
    """Let a rank that does not save wait for those that do, because its process may serve the store or end theirs.

    Args:
        run: the name of the failed run, equal on all ranks.
        rank: the rank of this process.
        savers: the ranks that save.
        patience: how long to wait.
        dead: returns the global ranks that are known to have died, which are not waited for.
    """
    keys = {saver: f"lightning_paral/failed/{run}/saved/{saver}" for saver in savers}
    deadline = time.monotonic() + patience.total_seconds()
    with suppress(dist.DistError, RuntimeError):  # the process that serves the store has ended
        store = default_store()
        if rank in keys:
            store.set(keys[rank], "")
            return
        while time.monotonic() < deadline:
            gone = dead()
            pending = [key for saver, key in keys.items() if saver not in gone]
            if not pending or store.check(pending):
                return
            time.sleep(_POLL_SECONDS)
