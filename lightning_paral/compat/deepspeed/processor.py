"""What DeepSpeed asks of the processor."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any


@contextmanager
def processor_read_once() -> Iterator[None]:
    """Let DeepSpeed's optimizers on the host read the processor's vendor once in a process, while this context lasts.

    `DeepSpeedCPUAdam` (0.19.8) asks `cpuinfo` for it each time it is made, which starts a process and takes a second.
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
