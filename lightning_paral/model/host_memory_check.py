"""Check that a host has enough free memory before its ranks gather full tensors."""

from pathlib import Path

from lightning_paral.distributed.host_exchange import every_rank

_USABLE = 0.9


def host_memory_shortage(num_bytes: int, num_local_ranks: int) -> str | None:
    """Return why `num_bytes` do not fit on every rank: some host lacks memory. `None` if they fit. *Collective*.

    Args:
        num_bytes: what each rank is about to allocate on its host.
        num_local_ranks: ranks per host.
    """
    available = _available_bytes()
    fits = available is None or num_bytes * num_local_ranks < _USABLE * available
    if every_rank(fits):
        return None
    return (
        f"{num_bytes / 1e9:,.1f} GB on each of {num_local_ranks} ranks per host are more than the memory that is free "
        "there"
    )


def _available_bytes() -> int | None:
    """Return the free memory of this host, or of this container if that is less; `None` if unknown."""
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
