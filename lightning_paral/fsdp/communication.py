"""FSDP2's collectives on gloo."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_paral.comm.reduce_scatter import direct_reduce_scatter


class DirectReduceScatter:
    """For gloo, whose own reduce-scatter is an all-reduce that throws most of its result away.

    It has the methods of what `FSDPModule.set_custom_reduce_scatter` takes, a class that has no public name.
    """

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for input or output."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """Write this rank's part of the sum or average of `input_tensor` to `output_tensor`. *Collective*."""
        direct_reduce_scatter(output_tensor, input_tensor, group)
        if op == dist.ReduceOp.AVG:
            output_tensor.div_(dist.get_world_size(group))
