"""Tensors without memory: to reserve space in a file, and to follow a training step without computing it."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from lightning_paral.compat.private_name import Names

NAMES: Names = {
    "torch._subclasses.fake_tensor": {
        "FakeTensorMode": "reserve space in a file for tensors that no rank holds in full",
        "DataDependentOutputException": "follow modules that call `.item()` on tensors without values",
    },
}


def fake_tensors(specs: Iterable[tuple[tuple[int, ...], torch.dtype]]) -> list[Tensor]:
    """Return a tensor without memory for each shape and dtype, for `torch.serialization.skip_data`."""
    from torch._subclasses.fake_tensor import FakeTensorMode  # slow to import

    with FakeTensorMode():
        return [torch.empty(shape, dtype=dtype) for shape, dtype in specs]


def fake_tensor_mode() -> Any:
    """Return a context in which new tensors have no memory, and operations compute shapes only.

    Inside, real tensors that an operation takes are treated as fake ones; `from_tensor` of the mode converts a tensor.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


def hide_accelerators() -> None:
    """Make torch see no accelerator for the rest of this process, a fork in which asking one raises an error.

    Optimizers ask before each step whether the stream of the device is being captured.
    """
    torch.cuda.is_available = lambda: False
    torch.accelerator.current_accelerator = lambda *_, **__: None


def is_value_missing(error: BaseException) -> bool:
    """Return whether `error` says that an operation needs the value of a tensor that has none, as `.item()` does."""
    from torch._subclasses.fake_tensor import DataDependentOutputException

    return isinstance(error, DataDependentOutputException)
