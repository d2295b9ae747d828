"""Read a number from a GPU without waiting for the GPU."""

import torch
from torch import Tensor


class AsyncScalar:
    """Copies a one-element tensor to the host asynchronously, in stream order.

    Args:
        tensor: the tensor to read, on any device. Later changes to it have no effect.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if tensor.device.type != "cuda":
            self._copy = tensor.clone()
            return
        self._copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
        self._copy.copy_(tensor, non_blocking=True)
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record(torch.cuda.current_stream(tensor.device))

    @property
    def has_arrived(self) -> bool:
        """Whether the number can be read without waiting."""
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def read(self) -> float | int | bool:
        """Return the number; wait for the copy if it has not arrived."""
        if self._event is not None:
            self._event.synchronize()
        return self._copy.item()
