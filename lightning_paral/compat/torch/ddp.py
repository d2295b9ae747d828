"""`DistributedDataParallel`: what it broadcasts, what it ignores, and the hooks of its reducer."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel

from lightning_paral.compat.private_name import Names
from lightning_paral.compat.torch.patches import replace_attributes

NAMES: Names = {
    "torch.distributed": {"_broadcast_coalesced": "broadcast tensors of dtypes that gloo or NCCL do not support"},
    "torch.nn.parallel.DistributedDataParallel": {
        "._ddp_params_and_buffers_to_ignore": "ignore what a module tells DDP to ignore",
        "_check_reducer_finalized; _remove_autograd_hooks": "replace the reducer after a complete backward pass",
    },
}


# Make DistributedDataParallel broadcast parameters and buffers of any dtype

_NAME = "_broadcast_coalesced"
_SUPPORTED = {
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex128, torch.complex64, torch.complex32,
    torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool,
}  # fmt: skip


def broadcast_any_dtype(module: Module) -> Callable[[], None]:
    """Make DDP broadcast tensors of `module` whose dtypes backends do not support; return a function that undoes it.

    In torch 2.13, gloo does not support float8, uint16 and int16 ("Invalid scalar type"), and NCCL only some of them.
    """
    if all(tensor.dtype in _SUPPORTED for tensor in (*module.parameters(), *module.buffers())):
        return lambda: None
    broadcast = vars(dist)[_NAME]

    def broadcast_bytes(group: Any, tensors: list[Tensor], *others: Any, **options: Any) -> None:
        broadcast(group, [_as_supported(tensor) for tensor in tensors], *others, **options)

    return replace_attributes(dist, {_NAME: broadcast_bytes})


def _as_supported(tensor: Tensor) -> Tensor:
    is_unchanged = tensor.dtype in _SUPPORTED or not tensor.is_contiguous()
    return tensor if is_unchanged else tensor.data.view(-1).view(torch.uint8)


# The parameters and buffers that a module tells `DistributedDataParallel` to ignore


def ignored_by_ddp(module: Module) -> set[str]:
    """Return the names of the parameters and buffers that `module` tells DDP to ignore."""
    return set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))


# Remove the hooks of a `DistributedDataParallel`'s reducer from the parameters


def remove_reducer(model: DistributedDataParallel) -> None:
    """Remove the hooks of the reducer of `model` from its parameters.

    Raises:
        RuntimeError: the last backward pass did not produce all gradients.
    """
    wrapper: Any = model
    wrapper._check_reducer_finalized()
    wrapper._remove_autograd_hooks()
