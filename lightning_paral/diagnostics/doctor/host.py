"""Host memory, pinned memory, shared memory and the limits of a process."""

import resource
import shutil

import psutil
import torch

from lightning_paral.diagnostics.doctor.facts import Fact
from lightning_paral.diagnostics.free_memory import free_host_bytes
from lightning_paral.quantities import format_bytes

_SHARED_MEMORY = "/dev/shm"
_MIN_SHARED = 2**30
_MIN_FILES, _MIN_PROCESSES = 1024, 1024
_PINNED_BYTES = 64 * 2**20


def host_facts() -> list[Fact]:
    """Return the memory of this machine, and the limits of this process."""
    return [_memory(), _pinned_memory(), _shared_memory(), _files_and_processes()]


def _memory() -> Fact:
    total, free = psutil.virtual_memory().total, free_host_bytes()
    return Fact(
        name="host memory",
        found=f"{format_bytes(free)} available of {format_bytes(total)}",
        data={"available": free, "total": total},
    )


def _pinned_memory() -> Fact:
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    data = {"memlock": _number(limit)}
    shown = f"memlock {_show_bytes(limit)}"
    if not torch.cuda.is_available():
        return Fact(name="pinned memory", found=f"{shown}; only CUDA pins memory", data=data)
    try:
        torch.empty(_PINNED_BYTES, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:
        found = f"{shown}; {format_bytes(_PINNED_BYTES)} cannot be pinned: {str(error).splitlines()[0]}"
        return Fact(name="pinned memory", found=found, state="warning", advice="ulimit -l unlimited", data=data)
    return Fact(name="pinned memory", found=f"{shown}; {format_bytes(_PINNED_BYTES)} were pinned", data=data)


def _shared_memory() -> Fact:
    try:
        usage = shutil.disk_usage(_SHARED_MEMORY)
    except OSError as error:
        found = f"{error.strerror}; workers of a DataLoader and NCCL need it"
        return Fact(name=_SHARED_MEMORY, found=found, state="warning", advice=f"Mount a tmpfs on {_SHARED_MEMORY}.")
    found = f"{format_bytes(usage.free)} free of {format_bytes(usage.total)}"
    data = {"free": usage.free, "total": usage.total}
    if usage.free < _MIN_SHARED:
        found += "; workers of a DataLoader and NCCL may need more"
        advice = "For Docker: docker run --shm-size=8g, or --ipc=host"
        return Fact(name=_SHARED_MEMORY, found=found, state="warning", advice=advice, data=data)
    return Fact(name=_SHARED_MEMORY, found=found, data=data)


def _files_and_processes() -> Fact:
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    processes, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    found = f"nofile {_show(files)}, nproc {_show(processes)}"
    data = {"nofile": _number(files), "nproc": _number(processes)}
    raised = [
        command
        for limit, least, command in (
            (files, _MIN_FILES, "ulimit -n 65536"),
            (processes, _MIN_PROCESSES, "ulimit -u 65536"),
        )
        if limit != resource.RLIM_INFINITY and limit < least
    ]
    if raised:
        return Fact(name="ulimits", found=found, state="warning", advice="; ".join(raised), data=data)
    return Fact(name="ulimits", found=found, data=data)


def _number(limit: int) -> int | None:
    return None if limit == resource.RLIM_INFINITY else limit


def _show(limit: int) -> str:
    return "unlimited" if limit == resource.RLIM_INFINITY else f"{limit:,}"


def _show_bytes(limit: int) -> str:
    return "unlimited" if limit == resource.RLIM_INFINITY else format_bytes(limit)
