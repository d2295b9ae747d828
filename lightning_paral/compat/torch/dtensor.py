"""The local tensor and layout of a DTensor, and the handlers of its operations."""

from collections.abc import Callable
from operator import attrgetter
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_paral.compat.private_name import Names

NAMES: Names = {
    "torch.distributed.tensor.DTensor": {
        "_local_tensor": "write to this rank's shard",
        "_spec": "support `tensor.data = value` for DTensors",
        "_op_dispatcher": "make operations return the same result as in one process",
    },
    "torch.distributed.tensor._dispatch.OpDispatcher": {
        "._custom_op_handlers": "make operations return the same result as in one process",
    },
}

local_of: Callable[[Any], Tensor] = attrgetter("_local_tensor")
"""Return the local tensor of a DTensor, not a view of it."""


def set_local(tensor: Any, local: Tensor) -> None:
    """Replace the local tensor of a DTensor with `local`, of the same shape."""
    tensor._local_tensor = local


def copy_data_and_layout(tensor: Any, value: Any) -> None:
    """Make a DTensor share the local tensor and the layout of `value`, a DTensor of the same shape."""
    tensor._local_tensor, tensor._spec = value._local_tensor, value._spec


def operation_handlers() -> dict[Any, Callable[..., Any]]:
    """Return DTensor's own dictionary of handlers, which run instead of operations. Changes to it take effect."""
    handlers: dict[Any, Callable[..., Any]] = DTensor._op_dispatcher._custom_op_handlers
    return handlers
