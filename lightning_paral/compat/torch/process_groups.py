"""torch's registry of process groups."""

from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store

from lightning_paral.compat.private_name import Names

NAMES: Names = {
    "torch.distributed.distributed_c10d": {"_get_default_store": "let ranks exchange messages outside of collectives"},
}


def default_store() -> Store:
    """Return the store of the default process group."""
    store: Store = _get_default_store()
    return store


def store_port() -> int | None:
    """Return the TCP port at which the store of the default process group is served; `None` for other stores."""
    store: Any = default_store()
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store.port if isinstance(store, dist.TCPStore) else None  # type: ignore[attr-defined]  # torch's stubs lack it


def is_alive(group: dist.ProcessGroup | None) -> bool:
    """Return whether `group` exists: it has not been destroyed, neither alone nor with the default group."""
    if group is None or not dist.is_initialized():
        return False
    try:
        dist.get_backend(group)
    except ValueError:  # torch raises it for groups that have been destroyed
        return False
    return True
