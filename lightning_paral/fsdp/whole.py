"""Read what is divided."""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


@torch.no_grad()
def whole(tensor: Tensor) -> Tensor:
    """Return a copy of `tensor` in its own shape. *Collective* over its mesh if it is sharded."""
    full: Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()
    return full.detach()
