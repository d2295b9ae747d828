"""Operations of torch's dispatcher, and modes that intercept them."""

from collections.abc import Callable
from operator import attrgetter
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from lightning_paral.compat.private_name import PrivateName

__all__ = ["TorchDispatchMode", "schema_of", "without_modes"]

NAMES = (
    PrivateName(
        name="torch.utils._python_dispatch.TorchDispatchMode",
        purpose="to see every operation that is run",
        reason="torch's documentation names it, but only in this private module",
        seen="torch 2.11 to 2.13",
    ),
    PrivateName(
        name="torch.utils._python_dispatch._disable_current_modes",
        purpose="to run operations that our mode must not see",
        reason="no public function suspends modes",
        seen="torch 2.11 to 2.13",
        parameters=(),
    ),
    PrivateName(
        name="torch._ops.OpOverload._schema",
        purpose="to know the arguments of an operation, and which of them it writes to",
        reason="no public name has them other than as the schema's text",
        seen="torch 2.11 to 2.13",
        on_instances=True,
    ),
)

schema_of: Callable[[Any], Any] = attrgetter("_schema")
"""Return the schema of an operation, a `torch.FunctionSchema`."""

without_modes: Callable[[], Any] = _disable_current_modes
"""Return a context in which no mode sees any operation."""
