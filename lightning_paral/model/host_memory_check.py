"""Check that every node has enough free host memory before its ranks gather full tensors."""

from pathlib import Path

from lightning_paral.distributed.exchange import every_rank

_USABLE = 0.9


def host_memory_shortage(num_bytes: int, num_local_ranks: int) -> str | None:
    """Return an explanation if some node lacks host memory for its ranks, or `None` if none does. *Collective*.

    Args:
        num_bytes: the number of bytes of host memory that each rank is about to allocate.
        num_local_ranks: the number of ranks per node.
    """
    available = available_bytes()
    fits = available is None or num_bytes * num_local_ranks < _USABLE * available
    if every_rank(fits):
        return None
    return (
        f"{num_local_ranks} ranks per node would need {num_bytes / 1e9:,.1f} GB of host memory each, but some node has "
        "less free memory"
    )


def available_bytes() -> int | None:
    """Return the free host memory of this node, or of this container if that is less; `None` if unknown."""
    found = [free for free in (_free_on_node(), _free_in_container()) if free is not None]
    return min(found, default=None)


def _free_on_node() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")), None)


def _free_in_container(folder: Path = Path("/sys/fs/cgroup")) -> int | None:
    try:
        free = int((folder / "memory.max").read_text()) - int((folder / "memory.current").read_text())
        statistics = (folder / "memory.stat").read_text().splitlines()
    except (OSError, ValueError):  # without a limit, the file contains "max"
        return None
    # The kernel frees the cache of files that are not in use before memory runs out.
    return free + sum(int(line.split()[1]) for line in statistics if line.startswith("inactive_file "))
