"""The memory of this process, and its peak since a moment of our choice: resident memory, or that of the GPU."""

from contextlib import suppress
from pathlib import Path

import torch

from lightning_paral.distributed.resident_memory import STATUS, peak_resident_bytes, resident_bytes
from lightning_paral.errors import ConfigurationError

_CLEAR = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"
"""What to write to `clear_refs` (proc_pid_clear_refs(5))."""


def check_resident_peak() -> None:
    """Check that the system tells the peak of resident memory.

    Raises:
        ConfigurationError: it does not. Only Linux does.
    """
    if not STATUS.is_file():
        raise ConfigurationError(
            f"paral bench memory reads the peak of resident memory from {STATUS}, which only Linux has. Run it on "
            "Linux; `paral plan` predicts memory everywhere."
        )


class PeakMemory:
    """Measures memory above what this process holds when this object is created: what imports take is not counted.

    On CUDA, it is the memory that torch has allocated on the device. On the CPU, it is the resident memory, whose peak
    is reset. Where the system does not permit that, an earlier peak of imports may hide a smaller one.

    Args:
        device: the device of this rank.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self._before = torch.cuda.memory_allocated(device)
            return
        with suppress(OSError):  # a container may mount it read-only
            _CLEAR.write_text(_RESET_PEAK)
        self._before = resident_bytes()

    def so_far(self) -> int:
        """Return the peak in bytes since this object was created."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device) - self._before
        return max(0, peak_resident_bytes() - self._before)
