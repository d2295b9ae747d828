"""What DeepSpeed reads about the processor."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any


@contextmanager
def cache_cpu_info() -> Iterator[None]:
    """Let DeepSpeed's CPU optimizers read the processor's vendor only once per process, inside this context.

    `DeepSpeedCPUAdam` (0.19.8) asks `cpuinfo` for it at every construction, which starts a process and takes a second.
    """
    import cpuinfo

    read = cpuinfo.get_cpu_info
    cpuinfo.get_cpu_info = _cpu_info
    try:
        yield
    finally:
        cpuinfo.get_cpu_info = read


@cache
def _cpu_info() -> Any:
    from cpuinfo.cpuinfo import get_cpu_info

    return get_cpu_info()
