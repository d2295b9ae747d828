"""The memory of this process."""

from dataclasses import dataclass
from typing import Any

import psutil
import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.parameter import is_lazy

from lightning_paral.distributed.resident_memory import peak_resident_bytes


@dataclass(frozen=True, kw_only=True)
class MemoryUse:
    """The memory of one rank, in bytes."""

    device_peak: int | None
    """The largest amount that torch's allocator had in use on the device since the process started, or since
    `torch.cuda.reset_peak_memory_stats`; `None` on other devices than CUDA."""
    host: int
    """Resident memory now."""
    host_peak: int
    """The largest resident memory since the process started. If the system does not tell it, the memory now."""
    host_grown: int | None = None
    """How much of `host_peak` a fit has added, with the tensors of its module; `None` if it is unknown."""


class HostBeforeFit:
    """Host memory when a fit begins.

    Args:
        module: the module of the fit. Its tensors in host memory count as memory of the fit.
    """

    def __init__(self, module: Module) -> None:
        self._peak = peak_resident_bytes()
        tensors = [*module.parameters(), *module.buffers()]
        storages = {id(storage): storage.nbytes() for storage in map(_host_storage, tensors) if storage is not None}
        self._without_module = psutil.Process().memory_info().rss - sum(storages.values())

    def grown(self, host_peak: int) -> int | None:
        """Return by how much the memory has grown at most; `None` if its peak was before the fit."""
        return host_peak - self._without_module if host_peak > self._peak else None


def _host_storage(tensor: Tensor) -> Any:
    return None if tensor.device.type != "cpu" or is_lazy(tensor) else tensor.untyped_storage()


def read_memory(device: torch.device, before: HostBeforeFit | None = None) -> MemoryUse:
    """Return the memory of this process. Takes about 0.1 ms, and does not wait for the device.

    Args:
        device: the device of the rank.
        before: host memory when the fit began, if it is known.
    """
    host = psutil.Process().memory_info().rss
    device_peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    host_peak = max(host, peak_resident_bytes())
    grown = None if before is None else before.grown(host_peak)
    return MemoryUse(device_peak=device_peak, host=host, host_peak=host_peak, host_grown=grown)
