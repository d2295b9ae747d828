"""The host memory that is free for ranks."""

import psutil

from lightning_paral.model.host_memory_check import available_bytes


def free_host_bytes() -> int:
    """Return the free host memory in bytes, of this container if it has less than the machine."""
    available = available_bytes()
    return psutil.virtual_memory().available if available is None else available
