"""Create tensors of our own classes that have a shape but no memory."""

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor

from lightning_paral.compat.private_name import Names

NAMES: Names = {
    "torch.Tensor": {"_make_wrapper_subclass": "make tensors that represent data in files or on other ranks"},
}


class WithoutMemory(Tensor):
    """The base of our classes of tensors that have a shape but no memory."""


T = TypeVar("T", bound=Tensor)


def without_memory(cls: type[T], shape: Sequence[int], dtype: torch.dtype, device: torch.device | None = None) -> T:
    """Return a tensor of class `cls`, which must define `__torch_dispatch__`; `device=None` means CPU."""
    tensor: T = Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=dtype, device=device)
    return tensor
