"""Exchange strings through the store of the default process group.

Unlike a collective, an exchange does not hang if some ranks do not take part, and it shows which of them did.
"""

from collections.abc import Iterable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from lightning_paral.compat.torch.process_groups import default_store


def exchange_in_store(key: str, value: str, timeout: timedelta, ranks: Iterable[int] | None = None) -> dict[int, str]:
    """Return, by global rank, the values of the ranks that call this with the same `key` within `timeout`.

    Args:
        key: a name for the exchange, which this process group has not used before.
        value: the value of this rank.
        timeout: how long to wait for the other ranks.
        ranks: the global ranks to wait for; all ranks by default.

    Raises:
        RuntimeError: the store cannot be reached, because the process that serves it has ended.
    """
    store: Any = default_store()
    keys = {
        rank: f"lightning_paral/{key}/{rank}" for rank in (range(dist.get_world_size()) if ranks is None else ranks)
    }
    store.set(keys[dist.get_rank()], value)
    with suppress(dist.DistError, RuntimeError):
        store.wait(list(keys.values()), timeout)
    return {rank: store.get(each).decode() for rank, each in keys.items() if store.check([each])}
