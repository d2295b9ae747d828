"""Tensors without memory for which `torch.save` reserves space in a file."""

from collections.abc import Iterable

import torch
from torch import Tensor

from lightning_paral.compat.private_name import PrivateName

NAMES = (
    PrivateName(
        name="torch._subclasses.fake_tensor.FakeTensorMode",
        purpose="to reserve space in a file for tensors that no rank holds in full",
        reason="torch.serialization.skip_data expects fake tensors, which no public name creates",
        seen="torch 2.11 to 2.13",
    ),
)


def fake_tensors(specs: Iterable[tuple[tuple[int, ...], torch.dtype]]) -> list[Tensor]:
    """Return a tensor without memory for each shape and dtype, for `torch.serialization.skip_data`."""
    from torch._subclasses.fake_tensor import FakeTensorMode  # slow to import

    with FakeTensorMode():
        return [torch.empty(shape, dtype=dtype) for shape, dtype in specs]
