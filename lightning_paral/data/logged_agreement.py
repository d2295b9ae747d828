"""Find the values that ranks have not reduced together: what was logged in which step, compared between the ranks."""

import json
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from torch.distributed.distributed_c10d import Store

from lightning_paral.distributed.exchange import name_ranks
from lightning_paral.distributed.mesh import ParallelDims
from lightning_paral.errors import ConfigurationError

_NUM_PARTS = 64
"""How many of the last parts of steps a rank remembers, of those in which it reduced a value."""
_NUM_NAMED = 8
_TELL_AFTER = 4.0
"""Seconds without a new value or step after which a rank tells the others which values it has reduced."""
_COMPARE_AFTER = 5.0
"""Seconds after which a rank that waits in the reduction of a value compares them."""
_COMPARE_OTHERWISE_AFTER = 10.0
"""The same for a rank that waits elsewhere: on CUDA, a reduction returns before the other ranks have joined it."""
_DID_NOT = "did not"

EVERY_RANK = (
    "Every rank must log the same keys with sync_dist=True, and log and compute the same metrics that are "
    "synchronized, in the same order, also with rank_zero_only=True. Log values that only some ranks have with "
    "sync_dist=False. Where only some ranks have something to count, call `metric.update(...)`, which waits for no "
    "other rank. If each rank computes a value of its own, create the metric with sync_on_compute=False."
)


@dataclass(frozen=True, kw_only=True)
class Record:
    """What a rank has reduced over the data ranks in the last parts of its steps."""

    number: tuple[int, int]
    """The current part, which has not ended."""
    since: tuple[int, int]
    """The first part that the rank remembers."""
    parts: list[tuple[tuple[int, int], str, list[str]]]
    """Of each part in which a value was reduced: its number, the step, and what was reduced, in order."""

    def to_json(self) -> str:
        """Return the record as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> "Record":
        """Return the record from which `to_json` made `text`."""
        found = json.loads(text)
        parts = [(tuple(number), where, reduced) for number, where, reduced in found["parts"]]
        return cls(number=tuple(found["number"]), since=tuple(found["since"]), parts=parts)


class LoggedHistory:
    """What this rank has reduced, by parts of steps. The main thread writes, the watcher's thread reads.

    A part ends with the backward pass, with the batch, with the hooks after it, or with a step of evaluation. All ranks
    reach these points in the same order, so parts with the same number contain the same values on all ranks.
    """

    def __init__(self) -> None:
        self.where = "the hooks before the first step"
        """The current step, such as `training batch 3 of epoch 0`. It is equal on all ranks."""
        self.num_events = 0
        """A number that changes with each part, and with each value."""
        self.is_reducing = False
        """Whether the main thread is in the reduction of a value."""
        self._num_steps = 0
        self._number = (0, 0)  # the second counts steps of evaluation, of which ranks have the same number in a loader
        self._parts: deque[tuple[tuple[int, int], str, list[str]]] = deque(maxlen=_NUM_PARTS)

    @property
    def step(self) -> tuple[int, int]:
        """The number of the current step, equal on all ranks. Steps that follow each other have different ones."""
        return self._num_steps, self._number[1]

    def begin_part(self, where: str | None = None) -> None:
        """Begin a step, or the next part of it, at a point that every rank reaches."""
        if where is not None:
            self.where = where
            self._num_steps += 1
        self._number = (self._number[0] + 1, 0)
        self.num_events += 1

    def begin_evaluation_step(self, where: str) -> None:
        """Begin a step of evaluation for which all ranks have a batch."""
        self.where = where
        self._number = (self._number[0], self._number[1] + 1)
        self.num_events += 1

    @contextmanager
    def reducing(self, what: str) -> Iterator[None]:
        """Remember that this rank reduces a value over all data ranks, such as `logged 'a' with sync_dist=True`."""
        if not self._parts or self._parts[-1][0] != self._number:
            self._parts.append((self._number, self.where, []))
        self._parts[-1][2].append(what)
        self.num_events += 1
        self.is_reducing = True
        try:
            yield
        finally:
            self.is_reducing = False

    def record(self) -> Record:
        """Return what this rank has reduced until now."""
        # Copies, because the main thread adds to them. The number first: a part that it ends must be complete.
        number, parts = self._number, [(part, where, list(reduced)) for part, where, reduced in tuple(self._parts)]
        return Record(number=number, since=parts[0][0] if len(parts) == _NUM_PARTS else (0, 0), parts=parts)


def find_difference(by_rank: Mapping[int, Record]) -> tuple[str, str] | None:
    """Return the first step in which ranks differ, and a clause that names the values and the ranks.

    Ranks differ if they reduce different values at the same place in a part, or if one of them has ended a part without
    a value that another one has in it. A rank that is slow has not ended the part.
    """
    reduced = {rank: {part: values for part, _, values in record.parts} for rank, record in by_rank.items()}
    wheres = {part: where for record in by_rank.values() for part, where, _ in record.parts}
    for part, where in sorted(wheres.items()):
        here = [rank for rank, record in sorted(by_rank.items()) if record.since <= part]
        for place in range(max(len(reduced[rank].get(part, ())) for rank in here)):
            ranks_by_value: dict[str, list[int]] = {}
            for rank in here:
                values = reduced[rank].get(part, [])
                if place < len(values):
                    ranks_by_value.setdefault(values[place], []).append(rank)
                elif by_rank[rank].number > part:
                    ranks_by_value.setdefault(_DID_NOT, []).append(rank)
            if len(ranks_by_value) > 1:
                in_order = sorted(ranks_by_value.items(), key=lambda item: item[0] == _DID_NOT)[:_NUM_NAMED]
                return where, " and ".join(f"{name_ranks(ranks)} {what}" for what, ranks in in_order)
    return None


def error_about(where: str, difference: str) -> ConfigurationError:
    """Return the error for a difference between what ranks have reduced."""
    return ConfigurationError(f"The ranks have not synchronized the same values in {where}: {difference}. {EVERY_RANK}")


class LoggedAgreement:
    """Compares what ranks have reduced once they wait for long: a `Topic` of the watcher.

    It ends the run only if a rank has passed the point at which another one waits, and has left out its value.

    Args:
        history: what this rank has reduced.
        dims: the parallel dimensions. The data ranks reduce the same values.
        fail: a function that ends the run with an error, given the place in the run.
    """

    def __init__(self, history: LoggedHistory, dims: ParallelDims, fail: Callable[[Exception, str], None]) -> None:
        self._history = history
        self._rank, self._ranks = dims.rank, dims.data_ranks
        self._fail = fail
        self._num_events = self._num_seen = -1
        self._since = 0.0
        self._has_told = False
        self._claim: str | None = None  # the key by which this rank has claimed to compare

    def poll(self, store: Store) -> None:
        """Tell the other ranks what this one has reduced if it waits for long, and compare."""
        if self._history.num_events != self._num_events:
            self._num_events, self._since = self._history.num_events, time.monotonic()
            self._has_told, self._num_seen = False, -1
            if self._claim is not None:
                store.delete_key(self._claim)
                self._claim = None
            return
        waited = time.monotonic() - self._since
        if waited > _TELL_AFTER and not self._has_told:
            self._has_told = True
            self._tell(store)
        if waited > (_COMPARE_AFTER if self._history.is_reducing else _COMPARE_OTHERWISE_AFTER):
            self._compare(store)

    def end(self, store: Store) -> None:
        """End with a run that ended well on this rank: tell the others, of which one may wait for a value in vain."""
        self._history.begin_part()
        self._tell(store)

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle as `None`, because it belongs to one run in one process."""
        return type(None), ()

    def _tell(self, store: Any) -> None:
        store.set(self._key(self._rank), self._history.record().to_json())
        store.add(self._key("told"), 1)

    def _compare(self, store: Any) -> None:
        # One rank compares for all that wait at the same place, when another one has told something new.
        ours = self._history.record()
        claim = self._key(f"compares/{ours.number}/{ours.parts[-1:]}")
        if store.compare_set(claim, "", str(self._rank)) != str(self._rank).encode():
            return
        self._claim, num_told = claim, store.add(self._key("told"), 0)
        if num_told == self._num_seen:
            return
        self._num_seen = num_told
        keys = {rank: self._key(rank) for rank in self._ranks if rank != self._rank}
        others = {rank: Record.from_json(store.get(key)) for rank, key in keys.items() if store.check([key])}
        if (found := find_difference({self._rank: ours, **others})) is not None:
            self._since = float("inf")  # compare no more
            self._fail(error_about(*found), found[0])

    def _key(self, name: object) -> str:
        return f"logged/{self._ranks[0]}/{name}"
