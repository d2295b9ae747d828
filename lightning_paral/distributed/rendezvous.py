"""Find the ranks of this start of a run in a store that may still have the keys of processes that have ended.

torchrun keeps its store when it restarts the processes, after a failure or because a node joined, and a script may run
several fits. So no fixed key says whether another rank has joined now, or had joined earlier and died.
"""

import json
import logging
import os
import time
import uuid
from collections.abc import Mapping
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from lightning_paral.errors import ProcessGroupError

_CURRENT = "current"
_FIRST_PAUSE, _LONGEST_PAUSE = 0.001, 0.2
"""Seconds between two looks at the store."""
_REMINDER = 60.0
"""After how many seconds rank 0 logs which ranks it is waiting for."""

log = logging.getLogger(__name__)


def connect(address: str, port: int, rank: int, world_size: int, timeout: timedelta) -> Store:
    """Return the store at this address. Rank 0 serves it unless torchrun does.

    Unlike torch's `rendezvous`, rank 0 does not wait for the other ranks here: `meet` waits, and names missing ranks.

    Raises:
        RuntimeError: the store cannot be reached within `timeout`, or the port is in use.
    """
    return dist.TCPStore(  # type: ignore[attr-defined]  # torch's stubs lack it
        host_name=address,
        port=port,
        world_size=world_size,
        is_master=rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True),
        timeout=timeout,
        wait_for_workers=False,
        multi_tenant=True,
        use_libuv=os.environ.get("USE_LIBUV", "1") == "1",  # as in torch's `rendezvous`
    )


def meet(store: Store, rank: int, world_size: int, timeout: timedelta) -> Store:
    """Return a namespace of `store` that only the ranks that call this now have. *Collective* over all ranks.

    Rank 0 chooses a new name and publishes it. The other ranks answer under this name, each with an identifier of its
    call. When all have answered, rank 0 confirms each identifier. A rank that has read the name of an earlier start
    gets no confirmation, and reads again. This takes two round trips to the store, and is linear in the number of
    ranks for rank 0 and constant for the others.

    Args:
        store: a store that may have keys of earlier calls, whether these returned or their processes were killed.
        rank: the rank of this process.
        world_size: the number of ranks.
        timeout: how long to wait for the other ranks.

    Raises:
        ProcessGroupError: some ranks have not called this within `timeout`. The message names them.
    """
    # The world size is in the prefix because runs of several world sizes may share a server.
    shared = PrefixStore(f"lightning_paral/{world_size}", store)
    deadline = time.monotonic() + timeout.total_seconds()
    name = _invite(shared, world_size, deadline) if rank == 0 else _answer(shared, rank, world_size, deadline)
    return PrefixStore(name, shared)


def _invite(store: Store, world_size: int, deadline: float) -> str:
    """Publish a new name, wait until all other ranks have answered, confirm their answers, and return the name."""
    name = uuid.uuid4().hex
    keys = {rank: _answer_key(name, rank) for rank in range(1, world_size)}
    store.set(_CURRENT, name)
    missing = _wait_for(store, keys, deadline)
    verdict = json.dumps({"name": name, "missing": missing})
    for rank, key in keys.items():
        if rank not in missing:
            store.set(_confirmation_key(store.get(key).decode()), verdict)
    if missing:
        raise _error(missing, world_size)
    return name


def _answer(store: Store, rank: int, world_size: int, deadline: float) -> str:
    """Answer rank 0 under the current name until rank 0 confirms, and return the name."""
    own = uuid.uuid4().hex
    confirmation = _confirmation_key(own)
    answered, polls = "", _Polls(deadline)
    while polls.sleep():
        current = store.get(_CURRENT).decode() if store.check([_CURRENT]) else ""
        if current != answered:
            store.set(_answer_key(current, rank), own)
            answered = current
            polls.restart()
        if store.check([confirmation]):
            verdict = json.loads(store.get(confirmation))
            if verdict["missing"]:
                raise _error(verdict["missing"], world_size)
            return str(verdict["name"])
    others = range(1, world_size) if answered else ()
    silent = [other for other in others if not store.check([_answer_key(answered, other)])]
    raise _error(silent or [0], world_size)


def _wait_for(store: Store, keys: Mapping[int, str], deadline: float) -> list[int]:
    """Wait until `store` has all `keys`, and return the ranks whose keys are missing at the deadline."""
    started = reminded = time.monotonic()
    polls = _Polls(deadline)
    while keys and not store.check(list(keys.values())) and polls.sleep():
        if time.monotonic() > reminded + _REMINDER:
            reminded = time.monotonic()
            missing = _have_not_joined(_missing(store, keys), len(keys) + 1)
            log.warning("Rank 0 has waited for %.0f s: %s", reminded - started, missing)
    return _missing(store, keys) if time.monotonic() > deadline else []


def _missing(store: Store, keys: Mapping[int, str]) -> list[int]:
    return [rank for rank, key in keys.items() if not store.check([key])]


class _Polls:
    """Pauses between two looks at the store, which get longer, until a deadline.

    `Store.wait` with a short timeout is not used, because torch prints a warning whenever one passes.
    """

    def __init__(self, deadline: float) -> None:
        self._deadline = deadline
        self._seconds = 0.0

    def restart(self) -> None:
        """Make the next pauses short again."""
        self._seconds = _FIRST_PAUSE

    def sleep(self) -> bool:
        """Pause; return `False` without a pause if the deadline has passed. The first call does not pause."""
        if time.monotonic() > self._deadline:
            return False
        time.sleep(self._seconds)
        self._seconds = min(max(self._seconds * 1.5, _FIRST_PAUSE), _LONGEST_PAUSE)
        return True


def _answer_key(name: str, rank: int) -> str:
    return f"{name}/answer/{rank}"


def _confirmation_key(identifier: str) -> str:
    return f"confirmed/{identifier}"


def _error(missing: list[int], world_size: int) -> ProcessGroupError:
    return ProcessGroupError(_have_not_joined(missing, world_size))


def _have_not_joined(missing: list[int], world_size: int) -> str:
    """Return a sentence that names the ranks: "ranks 2, 3 of 4 have not joined."."""
    shown = ", ".join(map(str, missing[:8])) + (f" and {len(missing) - 8} others" if len(missing) > 8 else "")
    if len(missing) == 1:
        return f"rank {shown} of {world_size} has not joined."
    return f"ranks {shown} of {world_size} have not joined."
