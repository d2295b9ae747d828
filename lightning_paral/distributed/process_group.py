"""Create, join, reuse and destroy the default process group, and choose its backend.

Ranks meet in a store that may still have the keys of processes that have ended: torchrun keeps its store when it
restarts the processes, after a failure or because a node joined, and a script may run several fits. So no fixed key
says whether another rank has joined now, or had joined earlier and died.
"""

import atexit
import gc
import json
import logging
import os
import socket
import time
import traceback
import uuid
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache

import torch
import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from torch.distributed.distributed_c10d import PrefixStore, Store

from lightning_paral.compat.torch.process_groups import abort_all
from lightning_paral.distributed.exchange import name_ranks
from lightning_paral.errors import ConfigurationError, ProcessGroupError

_CURRENT = "current"
_FIRST_PAUSE, _LONGEST_PAUSE = 0.001, 0.2
"""Seconds between two looks at the store."""
_REMINDER = 60.0
"""After how many seconds rank 0 logs which ranks it is waiting for."""
_PORT_IN_USE = ("EADDRINUSE", "address already in use")
_TIMED_OUT = (
    "Timed out waiting",
    "timed out after",
    "wait timeout after",
    "Application timeout caused pair closure",
    "Watchdog caught collective operation timeout",
)

log = logging.getLogger(__name__)

# Rank 0's store outlives the groups created with it. Otherwise a rank that starts its next fit early could connect to
# the store of the previous fit, which rank 0 is about to close. The keys are the address and port of a store, the rank
# and the world size.
_stores: dict[tuple[str, int, int, int], Store] = {}

_EXIT_PATIENCE = timedelta(seconds=2)
"""How long rank 0 waits at exit for the other ranks to destroy their groups."""


@dataclass(frozen=True)
class _OwnedGroup:
    """A default group that was created here, and its settings. A later run with equal settings reuses it."""

    group: dist.ProcessGroup
    store: Store
    backend: str
    settings: tuple[object, ...]
    """The backend, the rank, the world size, the device and the timeout."""


_owned: _OwnedGroup | None = None


def serves_store(port: int) -> bool:
    """Return whether this process already serves a store at `port`, which its later runs use as well."""
    return any(key[1] == port and key[2] == 0 for key in _stores)


def owned_group() -> dist.ProcessGroup | None:
    """Return the default process group if `join_process_group` created it, otherwise `None`."""
    current = dist.is_initialized() and _owned is not None and dist.group.WORLD is _owned.group
    return _owned.group if _owned is not None and current else None


def release_process_group(*, after_failure: bool = False) -> None:
    """Destroy all process groups if the default group was created here.

    Args:
        after_failure: whether to abort NCCL communicators, because destroying them would wait for ranks that failed.
    """
    global _owned
    if owned_group() is not None:
        if after_failure and _owned is not None and "nccl" in _owned.backend:
            abort_all()
        else:
            dist.destroy_process_group()
    _owned = None


def release_at_exit() -> None:
    """Destroy all process groups if the default group was created here, in an order that all backends tolerate.

    With NCCL, rank 0 waits for the other ranks, for two seconds at most.
    """
    if _owned is not None and owned_group() is not None and "nccl" in _owned.backend:
        # NCCL's watchdogs poll rank 0's store every second, and print long errors if it closes before they stop.
        rank, others = dist.get_rank(), range(1, dist.get_world_size())
        with suppress(dist.DistError, RuntimeError):
            if rank == 0 and others:
                _owned.store.wait([f"exit/{other}" for other in others], _EXIT_PATIENCE)
            dist.destroy_process_group()
            if rank > 0:
                _owned.store.set(f"exit/{rank}", "")
        return
    release_process_group()


def backend_for(device: torch.device, requested: str | None = None) -> str:
    """Return the backend for tensors on `device` that also supports CPU tensors and objects.

    This is `requested`, with gloo added for CPU tensors if needed: `"nccl"` becomes `"cuda:nccl,cpu:gloo"`.

    Raises:
        ConfigurationError: this build of torch lacks the backend, or the backend does not support tensors on `device`.
    """
    backend = requested or ("cuda:nccl,cpu:gloo" if device.type == "cuda" else "gloo")
    by_device = dict(part.split(":", 1) for part in backend.split(",")) if ":" in backend else {device.type: backend}
    for name in by_device.values():
        if not dist.is_backend_available(name):
            built = [known for known in ("gloo", "nccl", "xccl", "ucc", "mpi") if dist.is_backend_available(known)]
            raise ConfigurationError(
                f"process_group_backend={backend!r} needs {name!r}, which this build of torch does not have. "
                f"It has: {', '.join(built)}."
            )
    if device.type not in by_device or (by_device[device.type] == "nccl" and device.type != "cuda"):
        raise ConfigurationError(
            f"process_group_backend={backend!r} does not support tensors on {device.type!r}. "
            f"Leave it out to get {backend_for(device)!r}."
        )
    if ":" in backend:
        return backend if "cpu" in by_device else f"{backend},cpu:gloo"
    supported = dist.Backend.backend_capability.get(backend.lower(), ["cpu"])
    return backend if "cpu" in supported else f"{device.type}:{backend},cpu:gloo"


def check_device(device: torch.device) -> None:
    """Raise a `ConfigurationError` if `device` does not exist or torch.distributed has no backend for it."""
    if device.type not in ("cpu", "cuda"):
        raise ConfigurationError(
            f"lightning_paral trains on CPU and CUDA, but the accelerator selected {str(device)!r}, for which "
            "torch.distributed has no backend. Set `accelerator='cpu'` or `accelerator='gpu'` on a CUDA machine."
        )
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigurationError(
            f"This rank was assigned {device}, but only {torch.cuda.device_count()} CUDA device(s) are visible to it. "
            "Lower `devices`, or check CUDA_VISIBLE_DEVICES."
        )


def check_port_is_free(environment: ClusterEnvironment) -> None:
    """Raise a `ConfigurationError` if rank 0, which starts on this node, cannot listen on MASTER_PORT."""
    with socket.socket(socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", environment.main_port))
        except OSError as error:
            raise ConfigurationError(
                f"Cannot listen on MASTER_PORT={environment.main_port}: {error.strerror}. Another run may be using the "
                "port. Choose a free one, or unset MASTER_PORT to let Lightning choose one."
            ) from None


@cache
def protect_inherited_objects() -> None:
    """Prevent processes forked from this one from garbage-collecting inherited objects. Later calls have no effect.

    Otherwise the first garbage collection in a worker destroys unreachable process groups of an earlier run. Their
    destructor waits for threads that exist only in the parent process, so the worker hangs or crashes.
    """
    if hasattr(os, "register_at_fork"):  # not on Windows, which does not fork
        os.register_at_fork(after_in_child=gc.freeze)


def join_process_group(
    environment: ClusterEnvironment, device: torch.device, backend: str | None, timeout: timedelta
) -> None:
    """Use the existing default process group, or create one of all ranks. *Collective* over all ranks.

    A group created here outlives the run, as under Lightning's `ddp`, and is destroyed when the process exits. A later
    run reuses it if it has the same settings, and replaces it otherwise. A group that other code created is used and
    never destroyed.

    Args:
        environment: provides the rank, the world size and the address of rank 0.
        device: the device of this rank. With several ranks on CUDA the group is bound to it, so that NCCL initializes
            eagerly and barriers use this device.
        backend: the backend for `torch.distributed.init_process_group`; `None` to choose one that fits `device`.
        timeout: how long to wait for other ranks, here and in every collective.

    Raises:
        ConfigurationError: the existing group has a different rank or world size, or no backend for CPU tensors, or the
            port is in use.
        ProcessGroupError: not all ranks joined within `timeout`.
    """
    protect_inherited_objects()
    rank, world_size = environment.global_rank(), environment.world_size()
    global _owned
    if owned_group() is None and dist.is_initialized():
        _check_group_of_others(rank, world_size)
        _log_group("reused", device)
        return
    backend = backend_for(device, backend)
    settings = (backend, rank, world_size, device, timeout)
    if owned_group() is not None and _owned is not None:
        if _owned.settings == settings:
            _log_group("reused", device)
            return
        release_process_group()
    address, port = environment.main_address, environment.main_port
    if world_size > 1:
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = address, str(port)
    try:
        store = _next_store(address, port, rank, world_size, timeout)
        dist.init_process_group(
            backend,
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=timeout,
            # With a device id, NCCL initializes eagerly and splits later groups from this one, which can fail with a
            # single rank: https://github.com/deepspeedai/DeepSpeed/issues/8248
            device_id=device if device.type == "cuda" and world_size > 1 else None,
        )
    except (dist.DistError, RuntimeError) as error:
        raise _describe_failure(error, rank, world_size, address, port, timeout) from error
    assert dist.group.WORLD is not None
    _owned = _OwnedGroup(dist.group.WORLD, store, backend, settings)
    atexit.unregister(release_at_exit)
    # atexit runs this before functions that were registered earlier, which may end something that the group depends on.
    atexit.register(release_at_exit)
    _log_group("joined", device)


def _log_group(what: str, device: torch.device) -> None:
    rank, world_size, backend = dist.get_rank(), dist.get_world_size(), dist.get_backend_config()
    log.info("process group %s: rank %d of %d, backend %s, device %s", what, rank, world_size, backend, device)


def explain_timeout(error: BaseException, timeout: timedelta, option: str) -> bool:
    """If `error` says that a collective timed out, add the timeout, and the option that sets it, to its message.

    Returns:
        bool: whether a collective timed out.
    """
    message = "".join(traceback.format_exception_only(error))  # `str` may fail for the class of a user's error
    timed_out = any(sign in message for sign in _TIMED_OUT)
    if error.args and timed_out and option not in message:
        error.args = (
            f"{error.args[0]}\nA collective did not finish within timeout={timeout}, set by `{option}`: some rank "
            "failed, hangs, or is slow. Look for the first error among all ranks. If a rank is only slow, raise the "
            "timeout.",
            *error.args[1:],
        )
    return timed_out


def _check_group_of_others(rank: int, world_size: int) -> None:
    """Raise a `ConfigurationError` if the default group, which other code has created, does not fit the run."""
    if (dist.get_rank(), dist.get_world_size()) != (rank, world_size):
        raise ConfigurationError(
            f"A process group exists in which this process is rank {dist.get_rank()} of {dist.get_world_size()}, but "
            f"the Trainer's devices and num_nodes make it rank {rank} of {world_size}. Make them agree, or let the "
            "strategy create the group."
        )
    backend = dist.get_backend_config()
    if "cpu" not in (part.split(":")[0] for part in backend.split(",")):
        raise ConfigurationError(
            f"A process group exists that supports CUDA tensors only (backend {backend!r}), but ranks exchange values "
            "in host memory as well. Create it with init_process_group('cuda:nccl,cpu:gloo'), or let the strategy "
            "create the group."
        )


def _describe_failure(
    error: Exception, rank: int, world_size: int, address: str, port: int, timeout: timedelta
) -> Exception:
    message = str(error)
    if any(sign in message for sign in _PORT_IN_USE):
        return ConfigurationError(
            f"Rank 0 cannot listen on MASTER_PORT={port}: it is in use on {address}. Choose a free port."
        )
    return ProcessGroupError(
        f"Rank {rank} of {world_size} could not join the others at MASTER_ADDR={address}, MASTER_PORT={port} "
        f"(timeout={timeout}): {message}\nCheck that all {world_size} ranks were started and that they can reach "
        "this address. If a node has several network interfaces, set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to the "
        "right one."
    )


# Find the ranks of this start of a run


def _next_store(address: str, port: int, rank: int, world_size: int, timeout: timedelta) -> Store:
    """Return a new namespace in the store at this address, after all ranks have joined it. *Collective*."""
    key = (address, port, rank, world_size)
    if key not in _stores:
        _stores[key] = connect(address, port, rank, world_size, timeout)
    store = _stores[key]
    store.set_timeout(timeout)
    return meet(store, rank, world_size, timeout)


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


def _have_not_joined(missing: list[int], world_size: int) -> str:
    """Return a sentence that names the ranks: "ranks 2, 3 of 4 have not joined."."""
    return f"{name_ranks(missing)} of {world_size} {'has' if len(missing) == 1 else 'have'} not joined."
