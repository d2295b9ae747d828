"""Which sub-group of stage 3 is in memory, of those whose fp32 weights and optimizer state are on NVMe."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning_paral.compat.deepspeed import subgroups


class Swapping:
    """Brings one sub-group at a time into memory, and leaves it there while a save reads it tensor by tensor.

    DeepSpeed reads and writes a sub-group whole: its weights and all of its optimizer's state.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._inside: int | None = None
        self._staying = False

    def concerns(self, index: int) -> bool:
        """Whether the sub-group is on NVMe."""
        return subgroups.is_on_nvme(self._optimizer, index)

    @contextmanager
    def staying(self) -> Iterator[None]:
        """Leave the sub-group that was read last in memory, until another is read or this context ends."""
        self._staying = True
        try:
            yield
        finally:
            self._staying = False
            self._release()

    @contextmanager
    def reading(self, index: int) -> Iterator[None]:
        """Have a sub-group in memory, to look at it only."""
        if self._inside != index:
            self._release()
            self._read(index)
        try:
            yield
        finally:
            if not self._staying:
                self._release()

    @contextmanager
    def writing(self, index: int) -> Iterator[None]:
        """Have a sub-group in memory, and write it back unless there is an error."""
        self._release()
        self._read(index)
        try:
            yield
            subgroups.swap_out(self._optimizer, index)
            self._inside = None
        finally:
            self._release()

    def _read(self, index: int) -> None:
        subgroups.swap_in(self._optimizer, index)
        self._inside = index

    def _release(self) -> None:
        if self._inside is not None:
            subgroups.let_go(self._optimizer, self._inside)
            self._inside = None
