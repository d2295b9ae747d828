"""Read what is divided."""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


@torch.no_grad()
def whole(tensor: Tensor) -> Tensor:
    """Return a copy of `tensor` in its own shape. *Collective* over its mesh if it is sharded."""
    if not isinstance(tensor, DTensor):
        return tensor.detach().clone()
    full: Tensor = tensor.full_tensor().detach()
    # On one rank `full_tensor` gathers nothing and returns the shard itself.
    is_shard = full.untyped_storage().data_ptr() == tensor.to_local().untyped_storage().data_ptr()
    return full.clone() if is_shard else full
