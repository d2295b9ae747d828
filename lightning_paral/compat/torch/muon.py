"""The orthogonalization in `torch.optim.Muon`."""

from collections.abc import Callable
from typing import Any

import torch

from lightning_paral.compat.private_name import Names, named

NAMES: Names = {
    "torch.optim._muon": {
        "_zeropower_via_newtonschulz(grad, ns_coefficients, ns_steps, eps)": "orthogonalize full matrices",
    },
}


def replace_newton_schulz(around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Callable[[], None]:
    """Replace torch's function with `around(torch's function)`; return a function that restores it.

    Raises:
        PrivateNameError: Muon in this version of torch calls a different function.
    """
    before = named(NAMES, "_zeropower_via_newtonschulz").resolve()
    muon: Any = torch.optim._muon
    muon._zeropower_via_newtonschulz = around(before)

    def undo() -> None:
        muon._zeropower_via_newtonschulz = before

    return undo
