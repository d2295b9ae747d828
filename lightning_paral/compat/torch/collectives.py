"""Collectives on one tensor under the names that torch has for them now: the old ones warn at every call (torch 2.13).

The warning names torch's own file, whoever called: it could not be left out for DeepSpeed alone.
"""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

all_gather_single: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter_single: Callable[..., Any] = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def rename_in(backend: Any) -> None:
    """Let `backend`, a `deepspeed.comm.torch.TorchBackend` (0.19.8), call collectives by their new names."""
    backend.all_gather_function = all_gather_single
    backend.reduce_scatter_function = reduce_scatter_single
