"""The machine and the versions with which a benchmark ran, for its table and its JSON."""

import os
import platform
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import torch

from lightning_paral._version import __version__
from lightning_paral.quantities import format_bytes

_LIBRARIES = ("lightning_paral", "torch", "lightning", "deepspeed")


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What a figure depends on."""

    date: str
    """In UTC, such as `2026-11-23`."""
    processor: str
    num_cores: int
    """The number of cores that this process may use."""
    memory_bytes: int
    devices: tuple[str, ...]
    """Names of the CUDA devices."""
    versions: dict[str, str]

    def as_json(self) -> dict[str, Any]:
        """Return the fields, for JSON."""
        return asdict(self)

    def describe(self) -> str:
        """Return one or two lines of text."""
        devices = f", {len(self.devices)} x {self.devices[0]}" if self.devices else ""
        versions = ", ".join(f"{name} {number}" for name, number in self.versions.items())
        return (
            f"{self.processor}, {self.num_cores} cores, {format_bytes(self.memory_bytes)}{devices}\n"
            f"{versions}; {self.date}"
        )


def this_machine() -> Machine:
    """Return a description of this machine."""
    return Machine(
        date=f"{datetime.now(UTC):%Y-%m-%d}",
        processor=_processor(),
        num_cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory_bytes=psutil.virtual_memory().total,
        devices=tuple(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())),
        versions={"Python": platform.python_version()} | {name: _version(name) for name in _LIBRARIES},
    )


def _version(name: str) -> str:
    return __version__ if name == "lightning_paral" else version(name)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
