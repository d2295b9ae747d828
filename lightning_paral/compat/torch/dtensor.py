"""The local tensor and layout of a DTensor, and the handlers of its operations."""

from collections.abc import Callable
from operator import attrgetter
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_paral.compat.private_name import PrivateName

_SEEN = "torch 2.11 to 2.13"

NAMES = (
    PrivateName(
        name="torch.distributed.tensor.DTensor._local_tensor",
        purpose="to write to this rank's shard",
        reason="with gradients enabled, to_local() returns a different tensor, and a GatheredView gathers before it",
        seen=_SEEN,
    ),
    PrivateName(
        name="torch.distributed.tensor.DTensor._spec",
        purpose="to support `tensor.data = value` for DTensors",
        reason="no public function changes the placements of an existing DTensor",
        seen=_SEEN,
    ),
    PrivateName(
        name="torch.distributed.tensor.DTensor._op_dispatcher",
        purpose="to make operations return the same result as in one process",
        reason="torch.distributed.tensor.experimental.register_sharding changes shardings, not results",
        seen=_SEEN,
    ),
    PrivateName(
        name="torch.distributed.tensor._dispatch.OpDispatcher._custom_op_handlers",
        purpose="to make operations return the same result as in one process",
        reason="torch.distributed.tensor.experimental.register_sharding changes shardings, not results",
        seen=_SEEN,
        on_instances=True,
    ),
)

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
