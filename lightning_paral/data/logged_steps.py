"""Remember which values a rank has reduced in which step, and find the step in which ranks differ."""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_paral.distributed.rank_names import name_ranks

_NUM_PARTS = 64
"""How many of the last parts of steps a rank keeps."""
_NUM_NAMED = 8

EVERY_RANK = (
    "Every rank must log the same keys with sync_dist=True, in the same order. Log values that only some ranks have "
    "with sync_dist=False, or log a torchmetrics metric, which every rank has."
)


@dataclass(frozen=True)
class Part:
    """A part of a step: until the backward pass, until the end of the batch, or until the next step."""

    number: tuple[int, int]
    """A position in the run that is equal on all ranks: the number of earlier parts, and in evaluation that of steps
    of the loader. It does not count the steps of loaders that have ended, of which ranks may have different numbers."""
    num_before: int
    """How many values had been reduced before."""
    where: str
    """The step, such as `training batch 3 of epoch 0`."""
    reductions: tuple[str, ...]
    """What was reduced, in order, such as `logged 'training_step.loss' with sync_dist=True`."""

    @property
    def num_reduced(self) -> int:
        """How many values have been reduced until the end of this part."""
        return self.num_before + len(self.reductions)


class LoggedSteps:
    """The parts of the last steps of this rank. The main thread writes, the watcher's thread reads."""

    def __init__(self) -> None:
        self._num_reduced = 0
        self._number = self._num_evaluated = self._num_steps = 0
        self._parts: deque[tuple[tuple[tuple[int, int], int, str], list[str]]] = deque(maxlen=_NUM_PARTS)
        self.where = "the hooks before the first step"
        """The current step."""
        self._parts.append((((0, 0), 0, self.where), []))
        self.num_events = 0
        """A number that changes with each part, and with each value."""
        self.is_reducing = False
        """Whether the main thread is in the reduction of a value."""
        self.find_difference: Callable[[], Exception | None] | None = None
        """During a run, returns an error about a value that this rank waits for in vain; `None` if it knows of none."""

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the function, which belongs to one run in one process."""
        return {**vars(self), "find_difference": None}

    def begin_step(self, where: str) -> None:
        """Begin a step that every rank runs."""
        self.where = where
        self._num_steps += 1
        self.begin_part()

    def begin_evaluation_step(self, where: str) -> None:
        """Begin a step of evaluation that every rank runs, except at the end of a loader."""
        self.where = where
        self._num_evaluated += 1
        self._begin()

    def end_loader(self, where: str) -> None:
        """End a loader of evaluation on all ranks."""
        self.begin_step(where)

    @property
    def step(self) -> int:
        """A number that is equal on all ranks in each step, and differs between steps that follow each other."""
        return self._num_steps + self._num_evaluated

    def begin_part(self, where: str | None = None) -> None:
        """Begin the next part of the step, or of what follows the steps, at a point that every rank reaches."""
        self.where = self.where if where is None else where
        self._number += 1
        self._num_evaluated = 0
        self._begin()

    def _begin(self) -> None:
        self._parts.append((((self._number, self._num_evaluated), self._num_reduced, self.where), []))
        self.num_events += 1

    def begin_reduction(self, what: str) -> None:
        """Begin to reduce a value over all data ranks.

        Args:
            what: what this rank has done, such as `logged 'training_step.loss' with sync_dist=True`.
        """
        self._num_reduced += 1
        self._parts[-1][1].append(what)
        self.num_events += 1
        self.is_reducing = True

    def end_reduction(self) -> None:
        """End the reduction."""
        self.is_reducing = False

    def parts(self) -> list[Part]:
        """Return the last parts. The last of them has not ended."""
        # Copies, because the main thread adds to them.
        return [Part(*part, tuple(reductions)) for part, reductions in tuple(self._parts)]


def as_list(parts: Iterable[Part]) -> list[Any]:
    """Return `parts` as values that can be written as JSON."""
    return [[part.number, part.num_before, part.where, part.reductions] for part in parts]


def from_list(values: Iterable[Any]) -> list[Part]:
    """Return the parts from which `as_list` made `values`."""
    return [
        Part((number[0], number[1]), num_before, where, tuple(reduced)) for number, num_before, where, reduced in values
    ]


def cannot_meet(ours: Sequence[Part], theirs: Sequence[Part]) -> bool:
    """Return whether one of two ranks has left out a value that the other one has reduced or waits to reduce.

    A rank that is slow has left out nothing: it has not reached the end of the part.
    """
    if not ours or not theirs:
        return False
    if _first_mismatch(ours, theirs) is not None:
        return True
    behind, ahead = sorted((ours, theirs), key=lambda parts: parts[-1].number)
    now = behind[-1]
    common = next((part for part in ahead if part.number == now.number), None)
    if common is None:  # `ahead` has run many steps since
        return ahead[-1].num_reduced < now.num_reduced
    if common.num_before != now.num_before:
        fewer, more = (behind, common) if now.num_before < common.num_before else (ahead, now)
        return fewer[-1].num_reduced < more.num_before
    return ahead[-1].number > now.number and ahead[-1].num_reduced < now.num_reduced


def explain_difference(by_rank: Mapping[int, Sequence[Part]]) -> tuple[str, str]:
    """Return the first step in which ranks differ, and a clause that names the values and the ranks.

    Args:
        by_rank: the parts of each rank. `cannot_meet` is true of two of them.
    """
    numbers = sorted({part.number for parts in by_rank.values() for part in parts})
    for number in numbers:
        found = {rank: part for rank, parts in by_rank.items() for part in parts if part.number == number}
        ended = [rank for rank in found if by_rank[rank][-1].number > number]
        difference = _explain_part(found, ended)
        if difference:
            return next(iter(found.values())).where, difference
    first, *others = sorted(by_rank)
    for other in others:
        mismatch = _first_mismatch(by_rank[first], by_rank[other])
        if mismatch is not None:
            where, one, another = mismatch
            return where, f"rank {first} {one} while rank {other} {another}"
    counts = "; ".join(f"{parts[-1].num_reduced} on rank {rank}" for rank, parts in sorted(by_rank.items()))
    where = max(by_rank.values(), key=lambda parts: parts[-1].number)[-1].where
    return where, f"the number of values since the beginning of the run is {counts}"


def _first_mismatch(ours: Sequence[Part], theirs: Sequence[Part]) -> tuple[str, str, str] | None:
    """Return the first step in which two ranks reduce different values at the same time, and what they reduce."""
    there = {part.num_before + i: what for part in theirs for i, what in enumerate(part.reductions)}
    for part in ours:
        for number, what in enumerate(part.reductions, start=part.num_before):
            if there.get(number, what) != what:
                return part.where, what, there[number]
    return None


def _explain_part(found: Mapping[int, Part], ended: Sequence[int]) -> str:
    """Return a clause about the ranks that have ended a part without values of others; empty if there are none."""
    differences = []
    for what in dict.fromkeys(what for part in found.values() for what in part.reductions):
        most = max(part.reductions.count(what) for part in found.values())
        fewer = [rank for rank in ended if found[rank].reductions.count(what) < most]
        if fewer:
            those = [rank for rank, part in found.items() if part.reductions.count(what) == most]
            did = "did not" if all(what not in found[rank].reductions for rank in fewer) else "did so less often"
            differences.append(f"{name_ranks(those)} {what} and {name_ranks(fewer)} {did}")
    return "; ".join(differences[:_NUM_NAMED])
