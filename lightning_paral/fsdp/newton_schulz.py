"""Muon on whole matrices."""

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from lightning_paral.fsdp.rows import like, own_rows

_NAME = "_zeropower_via_newtonschulz"


class WholeNewtonSchulz:
    """Lets `torch.optim.Muon` orthogonalise whole matrices, as it does in one process, until it is removed.

    DTensor would multiply shards, and round partial sums to bfloat16 before it adds them (torch 2.13): another update,
    by 1e-2 of it. Gathering the matrix once is less traffic, too, than five iterations on shards.
    """

    def __init__(self) -> None:
        self._muon: Any = getattr(torch.optim, "_muon", None)  # since torch 2.9
        if self._muon is None:
            return
        self._before = before = vars(self._muon)[_NAME]

        def orthogonalise(gradient: Any, *args: Any, **kwargs: Any) -> Any:
            rows = own_rows(gradient) if isinstance(gradient, DTensor) else None
            if rows is None:
                return before(gradient, *args, **kwargs)
            return like(gradient, before(gradient.full_tensor(), *args, **kwargs), rows)

        vars(self._muon)[_NAME] = orthogonalise

    def remove(self) -> None:
        """Give torch's back."""
        if self._muon is not None:
            vars(self._muon)[_NAME] = self._before
