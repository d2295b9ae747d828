"""DeepSpeed's collectives on gloo, with a reduce-scatter and a reduce that send as little as in the ZeRO paper."""

from typing import Any

import torch.distributed as dist
from deepspeed.comm.torch import TorchBackend
from torch import Tensor

from lightning_paral.comm.reduce_scatter import direct_reduce_scatter, start_reduce

_MAX_GATHERED_BYTES = 25 * 2**20
"""gloo holds a copy of what one call gathers."""


class GlooBackend(TorchBackend):  # type: ignore[misc]
    """DeepSpeed's `torch.distributed` backend for gloo. All reductions are sums of CPU tensors."""

    def reduce(self, tensor: Tensor, dst: int, op: Any = None, group: Any = None, async_op: bool = False) -> Any:
        """Sum `tensor` on global rank `dst`. *Collective*."""
        group = group or dist.group.WORLD
        for work in start_reduce(tensor.view(-1), dist.get_group_rank(group, dst), group):
            work.wait()

    def reduce_scatter_tensor(
        self, output_tensor: Tensor, input_tensor: Tensor, op: Any = None, group: Any = None, async_op: bool = False
    ) -> Any:
        """Write this rank's chunk of the sum of `input_tensor` over the ranks to `output_tensor`. *Collective*."""
        world: Any = dist.group.WORLD
        direct_reduce_scatter(output_tensor, input_tensor, group or world)

    def all_gather_into_tensor(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any = None, async_op: bool = False
    ) -> Any:
        """Gather `input_tensor` of all ranks into `output_tensor`, of which it may be a part. *Collective*.

        gloo copies what it gathers, so a large tensor, such as all weights at stages 1 and 2, is gathered in pieces.
        """
        size = output_tensor.nbytes
        if (
            async_op
            or size <= _MAX_GATHERED_BYTES
            or not (output_tensor.is_contiguous() and input_tensor.is_contiguous())
        ):
            return super().all_gather_into_tensor(output_tensor, input_tensor, group, async_op)
        own = input_tensor.view(-1)
        parts = output_tensor.view(-1).chunk(dist.get_world_size(group or dist.group.WORLD))
        length = -(-own.numel() * _MAX_GATHERED_BYTES // size)
        for start in range(0, own.numel(), length):
            piece = slice(start, start + length)
            dist.all_gather([part[piece] for part in parts], own[piece], group)
        return None
