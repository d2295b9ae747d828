"""Refuse forward-mode automatic differentiation, where it would fail or compute something else."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from torch.autograd import forward_ad

from lightning_paral.compat.torch.patches import replace_attributes
from lightning_paral.errors import ConfigurationError


@contextmanager
def refusing_forward_mode(reason: str) -> Iterator[None]:
    """Raise a `ConfigurationError` when code inside the block begins forward-mode AD.

    This is the case in `torch.func.jvp`, `jacfwd` and `hessian`, and in `torch.autograd.forward_ad.dual_level`.

    Args:
        reason: a sentence that says why it is refused, and what to do instead.
    """

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise ConfigurationError(
            f"Code in the run uses forward-mode automatic differentiation, as torch.func.jvp does. {reason}"
        )

    undo = replace_attributes(forward_ad, {"enter_dual_level": refuse, "make_dual": refuse})
    try:
        yield
    finally:
        undo()
