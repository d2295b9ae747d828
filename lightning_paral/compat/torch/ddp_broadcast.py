"""Let DistributedDataParallel give all ranks the same values of tensors of any dtype."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module

from lightning_paral.compat.private_name import PrivateName
from lightning_paral.compat.torch.patches import replace_attributes

NAMES = (
    PrivateName(
        name="torch.distributed._broadcast_coalesced",
        purpose="to broadcast tensors of dtypes that gloo and NCCL do not know",
        reason="DistributedDataParallel calls it for parameters and buffers, and has no option for another function",
        seen="torch 2.11 to 2.13",
    ),
)

_NAME = "_broadcast_coalesced"
_KNOWN = {
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex128, torch.complex64, torch.complex32,
    torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool,
}  # fmt: skip


def broadcast_any_dtype(module: Module) -> Callable[[], None]:
    """Let DDP broadcast what `module` has in dtypes such as float8 and uint16; return a function that ends this.

    gloo knows neither these nor int16 ("Invalid scalar type"), NCCL not all of them (torch 2.13).
    """
    if all(tensor.dtype in _KNOWN for tensor in (*module.parameters(), *module.buffers())):
        return lambda: None
    broadcast = vars(dist)[_NAME]

    def broadcast_bytes(group: Any, tensors: list[Tensor], *others: Any, **options: Any) -> None:
        broadcast(group, [_as_known(tensor) for tensor in tensors], *others, **options)

    return replace_attributes(dist, {_NAME: broadcast_bytes})


def _as_known(tensor: Tensor) -> Tensor:
    is_known = tensor.dtype in _KNOWN or not tensor.is_contiguous()
    return tensor if is_known else tensor.data.view(-1).view(torch.uint8)
