"""What a DTensor holds, as it holds it, and what is done for its operations."""

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
        purpose="to write to what this rank holds",
        reason="with gradients enabled, to_local() returns another tensor, which a Part of ours would gather first",
        seen=_SEEN,
    ),
    PrivateName(
        name="torch.distributed.tensor.DTensor._spec",
        purpose="to let `tensor.data = value` arrive",
        reason="the placements of a DTensor cannot be changed by public names",
        seen=_SEEN,
    ),
    PrivateName(
        name="torch.distributed.tensor.DTensor._op_dispatcher",
        purpose="to give operations the result that they have in one process",
        reason="torch.distributed.tensor.experimental.register_sharding changes shardings, not results",
        seen=_SEEN,
    ),
    PrivateName(
        name="torch.distributed.tensor._dispatch.OpDispatcher._custom_op_handlers",
        purpose="to give operations the result that they have in one process",
        reason="torch.distributed.tensor.experimental.register_sharding changes shardings, not results",
        seen=_SEEN,
        on_instances=True,
    ),
)

local_of: Callable[[Any], Tensor] = attrgetter("_local_tensor")
"""Return the tensor itself of which a DTensor consists on this rank."""


def set_local(tensor: Any, local: Tensor) -> None:
    """Let a DTensor consist of `local` on this rank, a tensor of the same shape."""
    tensor._local_tensor = local


def adopt(tensor: Any, value: Any) -> None:
    """Let a DTensor consist of what another one of its shape consists of, and be laid out like it."""
    tensor._local_tensor, tensor._spec = value._local_tensor, value._spec


def operation_handlers() -> dict[Any, Callable[..., Any]]:
    """Return the functions that do operations in DTensor's place, by operation: the dictionary that DTensor asks."""
    handlers: dict[Any, Callable[..., Any]] = DTensor._op_dispatcher._custom_op_handlers
    return handlers
