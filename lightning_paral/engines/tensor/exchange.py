"""Exchange the rows of a weight, so that each rank gets its part of each segment."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_paral.engines.tensor.collectives import range_of


def own_rows_of_segments(rows: Tensor, segments: tuple[int, ...], group: dist.ProcessGroup) -> Tensor:
    """Return this rank's part of each segment, from tensors of which each rank has consecutive rows. *Collective*.

    For example, one weight computes queries, keys and values. If 2 ranks have half of its rows each, the first has the
    rows for queries and for half of the keys. It gets half of the rows for each of the three instead.

    Args:
        rows: this rank's `own_range` of the first dimension, of size `sum(segments)`.
        segments: the sizes of the segments. The number of ranks divides each of them.
        group: the ranks.
    """
    exchanged: Tensor = _Exchange.apply(rows, segments, group)  # type: ignore[no-untyped-call]
    return exchanged


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, segments: tuple[int, ...], group: dist.ProcessGroup) -> Tensor:
        ctx.segments, ctx.group = segments, group
        order, sends, receives = _plan(segments, dist.get_rank(group), dist.get_world_size(group))
        return _exchanged(rows[order.to(rows.device)], sends, receives, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        order, sends, receives = _plan(ctx.segments, dist.get_rank(ctx.group), dist.get_world_size(ctx.group))
        returned = _exchanged(gradient.contiguous(), receives, sends, ctx.group)
        return returned[order.argsort().to(gradient.device)], None, None


def _plan(segments: tuple[int, ...], rank: int, num_ranks: int) -> tuple[Tensor, list[int], list[int]]:
    """Return the order in which `rank` sends its rows, how many it sends to each rank, and how many it gets from each.

    Rows arrive in the order of the full tensor, since each rank has consecutive ones.
    """
    wanted = [_rows_of(each, segments, num_ranks) for each in range(num_ranks)]
    held = [range_of(each, sum(segments), num_ranks) for each in range(num_ranks)]
    own = held[rank]
    sent = [rows[(rows >= own.start) & (rows < own.stop)] - own.start for rows in wanted]
    receives = [int(((wanted[rank] >= each.start) & (wanted[rank] < each.stop)).sum()) for each in held]
    return torch.cat(sent), [len(each) for each in sent], receives


def _rows_of(rank: int, segments: tuple[int, ...], num_ranks: int) -> Tensor:
    start, found = 0, []
    for size in segments:
        own = range_of(rank, size, num_ranks)
        found.append(torch.arange(start + own.start, start + own.stop, device="cpu"))
        start += size
    return torch.cat(found)


def _exchanged(rows: Tensor, sends: list[int], receives: list[int], group: dist.ProcessGroup) -> Tensor:
    received = rows.new_empty(sum(receives), *rows.shape[1:])
    # As bytes: gloo does not exchange bfloat16.
    row_bytes = rows[0].numel() * rows.element_size()
    dist.all_to_all_single(
        received.view(-1).view(torch.uint8),
        rows.view(-1).view(torch.uint8),
        [count * row_bytes for count in receives],
        [count * row_bytes for count in sends],
        group=group,
    )
    return received
