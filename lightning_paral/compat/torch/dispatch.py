"""Operations of torch's dispatcher, and modes that intercept them."""

from collections.abc import Callable
from operator import attrgetter
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from lightning_paral.compat.private_name import Names

__all__ = ["TorchDispatchMode", "packet_of", "schema_of", "without_modes"]

NAMES: Names = {
    "torch.utils._python_dispatch": {
        "TorchDispatchMode": "intercept every operation",
        "_disable_current_modes": "run operations without intercepting them",
    },
    "torch._ops.OpOverload": {
        "._schema": "know the arguments of an operation, and which of them it writes to",
        "._overloadpacket": "find the formula for the floating-point operations of an operation",
    },
}

packet_of: Callable[[Any], Any] = attrgetter("_overloadpacket")
"""Return the operation to which an overload belongs: `aten.mm` for `aten.mm.default`."""

schema_of: Callable[[Any], Any] = attrgetter("_schema")
"""Return the schema of an operation, a `torch.FunctionSchema`."""

without_modes: Callable[[], Any] = _disable_current_modes
"""Return a context manager in which no mode intercepts operations."""
