"""Average the full gradients of a step over the ranks that hold shards, each of which keeps its own part."""

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from lightning_paral.checkpoint.dtensor_chunks import dtensor_like
from lightning_paral.comm.reduce_scatter import sum_of_own_chunk
from lightning_paral.compat.torch.dtensor import local_of


@torch.no_grad()
def scatter_gradients(params: Sequence[Any], gradients: Sequence[Tensor | None], group: dist.ProcessGroup) -> None:
    """Add this rank's part of the mean of `gradients` over `group` to the gradients of the shards. *Collective*.

    Args:
        params: the `FSDPParam`s of a unit, sharded along their first dimension over `group`, of the same dtype.
        gradients: for each of them, its full gradient on this rank; `None` counts as zero.
        group: the ranks that hold different shards.
    """
    num_ranks = dist.get_world_size(group)
    sizes = [param.padded_sharded_param_size for param in params]
    like = local_of(params[0].sharded_param)
    padded = like.new_zeros((num_ranks, sum(map(torch.Size.numel, sizes))))
    position = 0
    for size, gradient in zip(sizes, gradients, strict=True):
        if gradient is not None:
            _fill(padded[:, position : position + size.numel()], gradient)
        position += size.numel()
    own = sum_of_own_chunk(padded, group).div_(num_ranks)
    for param, size, part in zip(params, sizes, torch.split(own, [size.numel() for size in sizes]), strict=True):
        shard: Parameter = param.sharded_param
        part = part.view(size).narrow(0, 0, local_of(shard).size(0))
        if shard.grad is None:
            shard.grad = dtensor_like(part, cast("Any", shard))
        else:
            local_of(shard.grad).add_(part)


def _fill(chunks: Tensor, gradient: Tensor) -> None:
    """Copy `gradient` to the rows of `chunks`, one after the other."""
    flat, length = gradient.contiguous().view(-1), chunks.size(1)
    full, rest = divmod(flat.numel(), length)
    chunks[:full].copy_(flat[: full * length].view(full, length))
    if rest:
        chunks[full, :rest].copy_(flat[full * length :])
