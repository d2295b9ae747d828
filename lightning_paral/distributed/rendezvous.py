"""Find the ranks of this start of a run in a store that may still have the keys of processes that have ended.

torchrun keeps its store when it restarts the processes, after a failure or because a node joined, and a script may run
several fits. So no fixed key says whether another rank has joined now, or had joined earlier and died.
"""

import json
import logging
import os
import time
import uuid
from collections.abc import Iterable
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

    Rank 0 publishes a new name. All ranks answer under this name with an identifier of their own, and rank 0 publishes
    whom it has found. A rank that has read the name of an earlier start does not find itself there, and reads again.

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
    begin, reminder, pause = time.monotonic(), _REMINDER, _FIRST_PAUSE
    own, name = uuid.uuid4().hex, ""
    if rank == 0:
        shared.set(_CURRENT, own)
    while True:
        seconds = time.monotonic() - begin
        is_late = seconds > timeout.total_seconds()
        # Before looking for this rank under the name that it has answered, because rank 0 may already meet again.
        current = shared.get(_CURRENT).decode() if shared.check([_CURRENT]) else ""
        found = json.loads(shared.get(f"{name}/found")) if name and shared.check([f"{name}/found"]) else {}
        if found.get(str(rank)) == own:
            missing = [each for each in range(world_size) if str(each) not in found]
            break
        if current != name:
            name, pause = current, _FIRST_PAUSE
            shared.set(f"{name}/{rank}", own)
        answers = {each: f"{name}/{each}" for each in range(world_size)}
        if rank == 0 and (is_late or shared.check(list(answers.values()))):
            by_rank = {each: shared.get(key).decode() for each, key in answers.items() if shared.check([key])}
            shared.set(f"{name}/found", json.dumps(by_rank))
            continue
        if is_late:
            missing = [each for each, key in answers.items() if not shared.check([key])] if name else [0]
            missing = missing or [0]
            break
        if rank == 0 and seconds > reminder:
            reminder += _REMINDER
            late = [each for each, key in answers.items() if not shared.check([key])]
            log.warning("Rank 0 has waited for %.0f s: %s", seconds, _have_not_joined(late, world_size))
        # Not `Store.wait` with a short timeout, because torch prints a warning whenever one passes.
        time.sleep(pause)
        pause = min(1.5 * pause, _LONGEST_PAUSE)
    if missing:
        raise ProcessGroupError(_have_not_joined(missing, world_size))
    return PrefixStore(name, shared)


def _have_not_joined(missing: Iterable[int], world_size: int) -> str:
    """Return a sentence that names the ranks: "ranks 2, 3 of 4 have not joined."."""
    ranks = list(missing)
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} others" if len(ranks) > 8 else "")
    return f"rank{'s'[: len(ranks) - 1]} {shown} of {world_size} {'has' if len(ranks) == 1 else 'have'} not joined."
