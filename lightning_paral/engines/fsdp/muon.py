"""Make Muon orthogonalize full matrices."""

from collections.abc import Callable
from typing import Any

from torch.distributed.tensor import DTensor

from lightning_paral.compat.torch.optimizers import replace_newton_schulz
from lightning_paral.engines.fsdp.local_rows import own_chunk, shard_like


class FullNewtonSchulz:
    """Makes `torch.optim.Muon` orthogonalize full matrices, as it does in one process, until `remove` is called.

    DTensor would multiply shards, and round partial sums to bfloat16 before it adds them (torch 2.13), which changes
    the update by about 1%. Gathering the matrix once also communicates less than five iterations on shards.
    """

    def __init__(self) -> None:
        self.remove = replace_newton_schulz(_on_full_matrix)
        """Restores torch's function."""


def _on_full_matrix(orthogonalize: Callable[..., Any]) -> Callable[..., Any]:
    def orthogonalize_full(gradient: Any, *args: Any, **kwargs: Any) -> Any:
        chunk = own_chunk(gradient) if isinstance(gradient, DTensor) else None
        if chunk is None:
            return orthogonalize(gradient, *args, **kwargs)
        return shard_like(gradient, orthogonalize(gradient.full_tensor(), *args, **kwargs), chunk)

    return orthogonalize_full
