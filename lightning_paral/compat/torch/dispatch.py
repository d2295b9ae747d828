"""Operations of torch's dispatcher, and modes that intercept them."""

from collections.abc import Callable
from operator import attrgetter
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from lightning_paral.compat.private_name import PrivateName

__all__ = ["TorchDispatchMode", "packet_of", "schema_of", "without_modes"]

NAMES = (
    PrivateName(
        name="torch.utils._python_dispatch.TorchDispatchMode",
        purpose="to intercept every operation",
        reason="torch documents this class, but only in a private module",
        seen="torch 2.11 to 2.13",
    ),
    PrivateName(
        name="torch.utils._python_dispatch._disable_current_modes",
        purpose="to run operations without intercepting them",
        reason="no public function disables modes temporarily",
        seen="torch 2.11 to 2.13",
        parameters=(),
    ),
    PrivateName(
        name="torch._ops.OpOverload._schema",
        purpose="to know the arguments of an operation, and which of them it writes to",
        reason="public names give the schema only as text",
        seen="torch 2.11 to 2.13",
        on_instances=True,
    ),
    PrivateName(
        name="torch._ops.OpOverload._overloadpacket",
        purpose="to find the formula for the floating-point operations of an operation",
        reason="torch.utils.flop_counter keeps its formulas by this attribute",
        seen="torch 2.11 to 2.13",
        on_instances=True,
    ),
)

packet_of: Callable[[Any], Any] = attrgetter("_overloadpacket")
"""Return the operation to which an overload belongs: `aten.mm` for `aten.mm.default`."""

schema_of: Callable[[Any], Any] = attrgetter("_schema")
"""Return the schema of an operation, a `torch.FunctionSchema`."""

without_modes: Callable[[], Any] = _disable_current_modes
"""Return a context manager in which no mode intercepts operations."""
