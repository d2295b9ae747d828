"""Notice that a rank waits for the logged value of another rank that has left it out, and name key, step and ranks."""

import json
import time
from collections.abc import Callable
from typing import Any

from torch.distributed.distributed_c10d import Store

from lightning_paral.data.logged_steps import (
    LoggedSteps,
    Part,
    as_list,
    cannot_meet,
    explain_difference,
    from_list,
)
from lightning_paral.data.step_metrics import advice_for
from lightning_paral.distributed.mesh import ParallelDims
from lightning_paral.errors import ConfigurationError

_TELL_AFTER = 4.0
"""Seconds without a new value or step after which a rank tells the others which values it has reduced."""
_COMPARE_AFTER = 5.0
"""Seconds after which a rank that waits in the reduction of a value compares them."""
_COMPARE_OTHERWISE_AFTER = 10.0
"""The same for a rank that waits elsewhere: on CUDA, a reduction returns before the other ranks have joined it."""
_GRACE_SECONDS = 1.0
"""How long a rank that has found a difference waits for further ranks, to name them as well."""


class LoggedAgreement:
    """Compares the values that ranks have reduced once they wait for long: a `Topic` of the watcher.

    It ends the run only if a rank has passed the point at which another one waits, and has reduced fewer values.

    Args:
        steps: what this rank has reduced.
        dims: the parallel dimensions. The data ranks reduce the same values.
        fail: a function that ends the run with an error, given the place in the run.
    """

    def __init__(self, steps: LoggedSteps, dims: ParallelDims, fail: Callable[[Exception, str], None]) -> None:
        self._steps = steps
        self._rank, self._ranks = dims.rank, dims.data_ranks
        self._fail = fail
        self._num_events = -1
        self._since = 0.0
        self._has_told = False
        self._claim: str | None = None  # the key by which this rank has claimed to compare
        self._num_seen = -1
        self._found_at: float | None = None
        self._has_failed = False

    def poll(self, store: Store) -> None:
        """Tell the other ranks what this one has reduced if it waits for long, and compare."""
        num_events, now = self._steps.num_events, time.monotonic()
        if self._has_failed:
            return
        if num_events != self._num_events:
            self._begin_waiting(store, num_events, now)
            return
        waited = now - self._since
        if waited < _TELL_AFTER:
            return
        if not self._has_told:
            self._has_told = True
            self._tell(store)
        if waited > (_COMPARE_AFTER if self._steps.is_reducing else _COMPARE_OTHERWISE_AFTER):
            self._compare(store, now)

    def end(self, store: Store) -> None:
        """End with a run that ended well on this rank: tell the others, of which one may wait for a value in vain."""
        self._steps.begin_part()
        self._steps.find_difference = None
        self._tell(store)

    def find_difference(self, store: Store) -> Exception | None:
        """Return an error if a rank that has ended the run has left out a value that this rank has to reduce."""
        return self._explain(store)[0] if self._differs(store) else None

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle as `None`, because it belongs to one run in one process."""
        return type(None), ()

    def _tell(self, store: Any) -> None:
        store.set(self._key(self._rank), json.dumps(as_list(self._steps.parts())))
        store.add(self._key("told"), 1)

    def _begin_waiting(self, store: Any, num_events: int, now: float) -> None:
        self._num_events, self._since = num_events, now
        self._has_told, self._num_seen, self._found_at = False, -1, None
        claim, self._claim = self._claim, None
        if claim is not None:
            store.delete_key(claim)

    def _compare(self, store: Any, now: float) -> None:
        if self._claim is None:  # one rank compares for all that wait for the same value, until it waits no longer
            claim = self._key(f"compares/{self._num_events}")
            if store.compare_set(claim, "", str(self._rank)) != str(self._rank).encode():
                return
            self._claim = claim
        if self._found_at is None:
            num_told = store.add(self._key("told"), 0)
            if num_told == self._num_seen:
                return
            self._num_seen = num_told
            if self._differs(store):
                self._found_at = now
        elif now - self._found_at >= _GRACE_SECONDS:
            self._has_failed = True
            error, where = self._explain(store)
            self._fail(error, where)

    def _differs(self, store: Any) -> bool:
        ours = self._steps.parts()
        return any(cannot_meet(ours, theirs) for theirs in self._read_others(store).values())

    def _explain(self, store: Any) -> tuple[ConfigurationError, str]:
        by_rank = {self._rank: self._steps.parts(), **self._read_others(store)}
        where, difference = explain_difference(dict(sorted(by_rank.items())))
        error = ConfigurationError(
            f"The ranks have not synchronized the same values in {where}: {difference}. {advice_for(difference)}"
        )
        return error, where

    def _read_others(self, store: Any) -> dict[int, list[Part]]:
        keys = {rank: self._key(rank) for rank in self._ranks if rank != self._rank}
        return {rank: from_list(json.loads(store.get(key))) for rank, key in keys.items() if store.check([key])}

    def _key(self, name: object) -> str:
        return f"logged/{self._ranks[0]}/{name}"
