"""Add up the memory of a rank during a step, and remember the moment with the most."""

from dataclasses import dataclass
from enum import Enum


class Item(Enum):
    """What memory is for."""

    PARAMETERS = "parameters"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"
    ACTIVATIONS = "activations"
    """Also buffers of the module, the batch, and temporaries of the optimizer."""
    COMMUNICATION = "communication"
    """Unsharded parameters, and buckets."""


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """The memory of one rank in bytes, at the moment of a step at which its device needs the most."""

    by_item: dict[Item, int]
    """On the device."""
    host_bytes: int = 0
    """In host memory, if the device is not the CPU."""
    nvme_bytes: int = 0

    @property
    def peak_bytes(self) -> int:
        """The most that the device needs."""
        return sum(self.by_item.values())


class Ledger:
    """Counts bytes by item."""

    def __init__(self) -> None:
        self._now = dict.fromkeys(Item, 0)
        self._total = 0
        self._most = -1
        self._at_peak = dict(self._now)
        self.host_bytes = 0
        self.nvme_bytes = 0

    def add(self, item: Item, num_bytes: float) -> None:
        """Allocate bytes, or free them if negative."""
        self._now[item] += int(num_bytes)
        self._total += int(num_bytes)
        if self._total > self._most:
            self._most, self._at_peak = self._total, dict(self._now)

    def pulse(self, item: Item, num_bytes: float) -> None:
        """Allocate bytes, and free them at once."""
        self.add(item, num_bytes)
        self.add(item, -int(num_bytes))

    @property
    def now(self) -> dict[Item, int]:
        """Bytes by item at present."""
        return self._now

    def result(self) -> RankMemory:
        """Return the memory at the peak."""
        return RankMemory(by_item=self._at_peak, host_bytes=self.host_bytes, nvme_bytes=self.nvme_bytes)
