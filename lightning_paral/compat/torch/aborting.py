"""Abort NCCL communicators and gloo without the other ranks, and learn of the errors that they have found."""

import ctypes
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _abort_process_group, _world

from lightning_paral.compat.private_name import Names

NAMES: Names = {
    "torch.distributed.distributed_c10d": {
        "_abort_process_group(group)": "abort all process groups of a rank that failed alone (pytorch#119797)",
        "_world": "find all process groups of this process",
    },
    "torch.distributed.ProcessGroup": {"_get_backend": "find the NCCL backend of a process group"},
}

_inherited: set[str] = set()
"""The sockets that this process has from the one that forked it, such as those of a notebook's kernel."""
_on_mismatch: Callable[[], None] | None = None


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


def close_connections(store_port: int | None) -> None:
    """Shut down the TCP connections of this process, so that its collectives over gloo end with an error.

    `ProcessGroupGloo.abort` does nothing, and destroying the group closes no connection as long as anything refers to
    it (torch 2.13). Connections to `store_port` and inherited ones stay open. Without /proc, this does nothing.
    """
    for descriptor, name in _sockets():
        # An error: it was closed in the meantime, or is not connected.
        with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as found:
            is_tcp = found.type == socket.SOCK_STREAM and found.family in (socket.AF_INET, socket.AF_INET6)
            if name in _inherited or not is_tcp:
                continue
            if store_port not in (found.getsockname()[1], found.getpeername()[1]):
                found.shutdown(socket.SHUT_RDWR)


def _sockets() -> Iterator[tuple[int, str]]:
    for number in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        with suppress(OSError):
            if (name := os.readlink(f"/proc/self/fd/{number}")).startswith("socket:"):
                yield int(number), name


def _note_inherited() -> None:
    _inherited.update(name for _, name in _sockets())


if hasattr(os, "register_at_fork"):  # not on Windows, which does not fork
    os.register_at_fork(after_in_child=_note_inherited)


def call_on_mismatch(call: Callable[[], None] | None) -> None:
    """Call `call` when another rank sends more than the collective of this one takes; if `None`, end this process.

    gloo then throws an exception in a thread of its own, in which nothing can catch it, so that C++ calls the function
    that `std::set_terminate` has set. Here it calls `call` and never returns, because gloo's thread must not go on.
    Collectives of this process do not end from then on, so `call` has to end its part in the run.
    """
    global _on_mismatch
    _on_mismatch = call
    with suppress(OSError, AttributeError):  # another C++ library than that of GCC
        set_terminate, handler, previous = _terminate_handlers()
        set_terminate(previous if call is None else handler)  # Python code cannot run when the process exits


@cache
def _terminate_handlers() -> tuple[Any, Any, Any]:
    """Return `std::set_terminate`, a handler, and the handler before. The first two live as long as the process."""
    library = ctypes.CDLL("libstdc++.so.6")
    set_terminate, get_terminate = library["_ZSt13set_terminatePFvvE"], library["_ZSt13get_terminatev"]
    exception_type = library["__cxa_current_exception_type"]
    get_terminate.restype = function = ctypes.CFUNCTYPE(None)
    exception_type.restype = ctypes.POINTER(ctypes.c_char_p)  # to a `std::type_info`, whose second word is the name
    previous = get_terminate()

    def terminate() -> None:
        found = exception_type()
        if _on_mismatch is not None and found and b"gloo" in (found[1] or b""):
            _on_mismatch()
            threading.Event().wait()
        previous()

    return set_terminate, function(terminate), previous
