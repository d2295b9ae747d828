"""The orthogonalization in `torch.optim.Muon`."""

from collections.abc import Callable
from typing import Any

import torch

from lightning_paral.compat.private_name import PrivateName

_NEWTON_SCHULZ = PrivateName(
    name="torch.optim._muon._zeropower_via_newtonschulz",
    purpose="to make Muon orthogonalize full matrices instead of shards",
    reason="Muon calls this module-level function, and has no option to replace it",
    seen="torch 2.11 to 2.13",
    parameters=("grad", "ns_coefficients", "ns_steps", "eps"),
)
NAMES = (_NEWTON_SCHULZ,)


def replace_newton_schulz(around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Callable[[], None]:
    """Replace torch's function with `around(torch's function)`; return a function that restores it.

    Raises:
        PrivateNameError: Muon in this version of torch calls a different function.
    """
    before = _NEWTON_SCHULZ.resolve()
    muon: Any = torch.optim._muon
    muon._zeropower_via_newtonschulz = around(before)

    def undo() -> None:
        muon._zeropower_via_newtonschulz = before

    return undo
