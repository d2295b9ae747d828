"""A reduce-scatter for FSDP2 on gloo."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_paral.comm.reduce_scatter import direct_reduce_scatter


class DirectReduceScatter:
    """A reduce-scatter for gloo, whose own reduce-scatter is an all-reduce that discards most of the result.

    It implements the interface that `FSDPModule.set_custom_reduce_scatter` expects, which has no public name.
    """

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return uninitialized memory for the input or the output."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """Write this rank's shard of the sum or average of `input_tensor` to `output_tensor`. *Collective*.

        The memory of `input_tensor` is then free: FSDP2 holds the tensor until the next unit has its gradients, because
        a stream might still read it.
        """
        direct_reduce_scatter(output_tensor, input_tensor, group)
        input_tensor.untyped_storage().resize_(0)
        if op == dist.ReduceOp.AVG:
            output_tensor.div_(dist.get_world_size(group))
