"""Differentiable all-gather and reduce-scatter of rows.

They are each other's backward pass, so second derivatives are exact as well.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_paral.comm.reduce_scatter import sum_of_own_chunk
from lightning_paral.compat.torch.process_groups import all_gather_single


def gather_rows(rows: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the rows of all ranks, one rank after another; the gradients of the rows are summed over the ranks.

    *Collective* in the forward pass and in the backward pass.

    Args:
        rows: shape `[n, ...]`, the same on all ranks.
        group: the ranks.
    """
    gathered: Tensor = _GatherRows.apply(rows, group)  # type: ignore[no-untyped-call]
    return gathered


def sum_to_rows(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's rows of the sum of the ranks' tensors. *Collective* in both passes.

    Args:
        tensor: shape `[n, ...]`, where the number of ranks divides n.
        group: the ranks.
    """
    own: Tensor = _SumToRows.apply(tensor, group)  # type: ignore[no-untyped-call]
    return own


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        gathered = rows.new_empty(rows.shape[0] * dist.get_world_size(group), *rows.shape[1:])
        # As bytes: gloo supports neither booleans nor int16.
        as_bytes = [each.view(-1).view(torch.uint8) for each in (gathered, rows.contiguous())]
        all_gather_single(*as_bytes, group=group)
        return gathered

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return sum_to_rows(gradient, ctx.group), None


class _SumToRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return sum_of_own_chunk(torch.unflatten(tensor.contiguous(), 0, (dist.get_world_size(group), -1)), group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gather_rows(gradient, ctx.group), None
