"""Whether a host has memory for what its ranks are about to bring together."""

from pathlib import Path

import torch
import torch.distributed as dist

from lightning_paral.distributed.process_group import host_group

_SHARE = 0.9


def lack_of_room(num_bytes: int, num_local_ranks: int) -> str | None:
    """Return why `num_bytes` cannot be had on every rank: some host lacks memory. `None` if it can. *Collective*."""
    available = _available_bytes()
    fits = available is None or num_bytes * num_local_ranks < _SHARE * available
    has_room = torch.tensor(fits, dtype=torch.int32)
    dist.all_reduce(has_room, op=dist.ReduceOp.MIN, group=host_group())
    if has_room:
        return None
    return (
        f"{num_bytes / 1e9:,.1f} GB on each of {num_local_ranks} ranks per host are more than the memory that is free "
        "there"
    )


def _available_bytes() -> int | None:
    """Return what this host has free, or this container may still take; `None` where nobody says."""
    found = [free for free in (_free_on_host(), _free_in_container()) if free is not None]
    return min(found, default=None)


def _free_on_host() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")), None)


def _free_in_container() -> int | None:
    folder = Path("/sys/fs/cgroup")
    try:
        return int((folder / "memory.max").read_text()) - int((folder / "memory.current").read_text())
    except (OSError, ValueError):  # no limit is "max"
        return None
