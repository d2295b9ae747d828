"""Group tensors that can be concatenated, or passed to one fused operation."""

from collections.abc import Iterable

import torch
from torch import Tensor


def group_by_dtype_and_device(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Group `tensors` by dtype and device. Groups are in the order of their first tensors."""
    groups: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    return list(groups.values())
