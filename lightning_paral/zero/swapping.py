"""Which sub-group of stage 3 is in memory, of those whose fp32 weights and optimizer state are on NVMe."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


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
        return bool(self._optimizer._swappable_optimizer_subgroup(index))

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
            self._optimizer._optimizer_states_and_gradient_swap_out(index)
            self._inside = None
        finally:
            self._release()

    def _read(self, index: int) -> None:
        self._optimizer._optimizer_states_and_gradient_swap_in(index)
        self._inside = index

    def _release(self) -> None:
        if self._inside is not None:
            self._optimizer._release_swap_buffers(self._inside)
            self._inside = None
