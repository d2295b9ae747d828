"""Process groups of torch: registry, names, timeouts, collectives, DDP's reducer, and how to abort them."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from datetime import timedelta
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import device_mesh, distributed_c10d
from torch.distributed.distributed_c10d import (
    GroupName,
    PrefixStore,
    Store,
    _abort_process_group,
    _world,
)
from torch.nn.parallel import DistributedDataParallel

from lightning_paral.compat.private_name import Names
from lightning_paral.compat.torch.patches import replace_attributes

NAMES: Names = {
    "torch.distributed.distributed_c10d": {
        "_process_group_name(ranks, use_hashed_name)": "name a process group that only its own ranks create",
        "_abort_process_group(group)": "abort all process groups of a rank that failed alone (pytorch#119797)",
        "_world": "find all process groups of this process",
    },
    "torch.nn.parallel.DistributedDataParallel": {
        "_check_reducer_finalized; _remove_autograd_hooks": "replace the reducer after a complete backward pass",
    },
    "torch.distributed.ProcessGroup": {"_get_backend": "find the NCCL backend of a process group"},
}


# torch's registry of process groups


def default_store() -> Store:
    """Return the store of the default process group, which must exist."""
    assert dist.group.WORLD is not None
    store: Store = dist.group.WORLD.get_group_store()
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


# Names of process groups that some ranks create without the others


def new_named_group(
    name: str, ranks: Sequence[int], *, timeout: timedelta | None = None, backend: str | None = None
) -> dist.ProcessGroup:
    """Create a process group without the ranks that are not in it. *Collective* over `ranks`.

    Args:
        name: a name that no other group of the default group has, equal on all `ranks`.
        ranks: the global ranks, which include that of this process.
        timeout: how long collectives may take; `None` for torch's default.
        backend: the backend; `None` for that of the default group.
    """
    before = distributed_c10d._process_group_name
    distributed_c10d._process_group_name = lambda ranks, use_hashed_name: GroupName(name)
    try:
        group: dist.ProcessGroup | None = dist.new_group(
            list(ranks),
            timeout=timeout,
            backend=backend,
            use_local_synchronization=True,
            group_desc=f"lightning_paral: {name}",
        )
    finally:
        distributed_c10d._process_group_name = before
    assert group is not None
    return group


# The timeout of process groups that are created without one


def use_default_timeout(timeout: timedelta) -> Callable[[], None]:
    """Create groups with `timeout`, unless the caller passes another one. Return a function that undoes this."""
    create, of_run, undo = dist.new_group, timeout, ExitStack()

    @wraps(create)
    def new_group(ranks: Any = None, timeout: timedelta | None = None, *args: Any, **options: Any) -> Any:
        return create(ranks, of_run if timeout is None else timeout, *args, **options)

    for importer in (dist, distributed_c10d, device_mesh):  # for users, `new_subgroups` and `init_device_mesh`
        undo.callback(replace_attributes(importer, {"new_group": new_group}))
    return undo.close


# Single-tensor collectives under their current names. In torch 2.13 and later, the old names warn at every call

all_gather_single: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter_single: Callable[..., Any] = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


# The reducer of `DistributedDataParallel`


def remove_reducer(model: DistributedDataParallel) -> None:
    """Remove the hooks of the reducer of `model` from its parameters.

    Raises:
        RuntimeError: the last backward pass did not produce all gradients.
    """
    wrapper: Any = model
    wrapper._check_reducer_finalized()
    wrapper._remove_autograd_hooks()


# Abort NCCL communicators and gloo without the other ranks, and learn of the errors that they have found


def nccl_backends() -> list[Any]:
    """Return the NCCL backend of each process group that has one; an empty list in a build of torch without NCCL."""
    if not dist.is_nccl_available() or not dist.is_initialized():
        return []
    found = []
    for group in list(_world.pg_map):
        with suppress(RuntimeError):  # the group has no backend for CUDA
            backend = group._get_backend(torch.device("cuda"))
            if isinstance(backend, dist.ProcessGroupNCCL):
                found.append(backend)
    return found


def nccl_errors() -> list[str]:
    """Return the errors that NCCL's watchdogs have found: `"TIMEOUT"`, `"COMM_ERROR"` or `"REMOTE_ERROR"`.

    This function makes no CUDA calls.
    """
    found: list[str] = [backend.get_error().name for backend in nccl_backends()]
    return [name for name in found if name != "SUCCESS"]


def abort_nccl() -> None:
    """Abort all NCCL communicators of this process. Collectives over host tensors continue to work.

    Communicators that are aborted one after the other can wait for each other (NCCL's issue 1013), so they are aborted
    as a group, as torch does. Only builds of torch with NCCL have the two methods that begin and end such a group.
    """
    backends = nccl_backends()
    if not backends:
        return
    getattr(backends[0], "_group_start", lambda: None)()
    for backend in backends:
        backend.abort()
    getattr(backends[0], "_group_end", lambda: None)()


def abort_all() -> None:
    """Abort the default process group and all others, without waiting for other ranks."""
    _abort_process_group()
