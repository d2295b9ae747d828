"""Differentiable collectives over the ranks that compute a layer together.

They are the conjugate operators f and g of Shoeybi et al., "Megatron-LM", arXiv:1909.08053, and those between split and
full activations. Copy and sum are each other's backward pass, and so are gather and split: second derivatives are exact
as well. Each is *collective* over `group` in the forward pass, the backward pass, or both, as its docstring
says. All ranks of `group` must have the same gradient of a full tensor.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_paral.compat.torch.process_groups import all_gather_single


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return sum_over_ranks(gradient, ctx.group), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _summed(tensor, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return copy_to_ranks(gradient, ctx.group), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, segments: tuple[int, ...], group: dist.ProcessGroup) -> Tensor:
        ctx.segments, ctx.group = segments, group
        return _gathered(tensor, segments, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return split_features(gradient, ctx.segments, ctx.group), None, None


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, segments: tuple[int, ...], group: dist.ProcessGroup) -> Tensor:
        ctx.segments, ctx.group = segments, group
        return torch.cat([tensor[..., each] for each in own_ranges(segments, group)], dim=-1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gather_features(gradient, ctx.segments, ctx.group), None, None


def copy_to_ranks(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return `tensor`, equal on all ranks, for each rank to compute with; its gradients are summed over the ranks.

    *Collective* in the backward pass.
    """
    copied: Tensor = _Copy.apply(tensor, group)  # type: ignore[no-untyped-call]
    return copied


def sum_over_ranks(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum of the ranks' tensors. *Collective* in the forward pass."""
    summed: Tensor = _Sum.apply(tensor, group)  # type: ignore[no-untyped-call]
    return summed


def gather_features(tensor: Tensor, segments: tuple[int, ...], group: dist.ProcessGroup) -> Tensor:
    """Return the ranks' parts of the last dimension joined. *Collective* in the forward pass.

    Args:
        tensor: this rank's `own_ranges` of the last dimension, one after another.
        segments: the full sizes of the segments of which the last dimension consists.
        group: the ranks.
    """
    if _are_rows(segments):
        return gather_features(_unflattened(tensor, len(segments)), segments[:1], group).flatten(-2)
    gathered: Tensor = _Gather.apply(tensor, segments, group)  # type: ignore[no-untyped-call]
    return gathered


def split_features(tensor: Tensor, segments: tuple[int, ...], group: dist.ProcessGroup) -> Tensor:
    """Return this rank's `own_ranges` of the last dimension of `tensor`, which is equal on all ranks.

    *Collective* in the backward pass.
    """
    if _are_rows(segments):
        return split_features(_unflattened(tensor, len(segments)), segments[:1], group).flatten(-2)
    split: Tensor = _Split.apply(tensor, segments, group)  # type: ignore[no-untyped-call]
    return split


def own_range(size: int, group: dist.ProcessGroup) -> slice:
    """Return the indices among `size` that belong to this rank, divided as by `torch.chunk` and DTensor's `Shard`."""
    return range_of(dist.get_rank(group), size, dist.get_world_size(group))


def own_ranges(segments: Iterable[int], group: dist.ProcessGroup) -> list[slice]:
    """Return the indices that belong to this rank in a dimension of several segments, one slice for each segment."""
    return _ranges_of(dist.get_rank(group), segments, dist.get_world_size(group))


def range_of(rank: int, size: int, num_ranks: int) -> slice:
    """Return the indices, among `size`, that belong to `rank` of `num_ranks`. The last ranks may have fewer or none."""
    length = -(-size // num_ranks)
    return slice(min(rank * length, size), min((rank + 1) * length, size))


def _ranges_of(rank: int, segments: Iterable[int], num_ranks: int) -> list[slice]:
    start, found = 0, []
    for size in segments:
        own = range_of(rank, size, num_ranks)
        found.append(slice(start + own.start, start + own.stop))
        start += size
    return found


def _are_rows(segments: tuple[int, ...]) -> bool:
    """Return whether all segments are alike. They are often many: each row of logits that are viewed as one row."""
    return len(segments) > 1 and len(set(segments)) == 1


def _unflattened(tensor: Tensor, num_rows: int) -> Tensor:
    return tensor.reshape(*tensor.shape[:-1], num_rows, tensor.shape[-1] // num_rows)


def _summed(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    summed = tensor.contiguous() if not tensor.is_contiguous() else tensor.clone()
    dist.all_reduce(summed, group=group)
    return summed


def _gathered(tensor: Tensor, segments: tuple[int, ...], group: dist.ProcessGroup) -> Tensor:
    num_ranks = dist.get_world_size(group)
    ranges = [_ranges_of(rank, segments, num_ranks) for rank in range(num_ranks)]
    lengths = [[each.stop - each.start for each in own] for own in ranges]
    longest = sum(lengths[0])
    padded = torch.nn.functional.pad(tensor, (0, longest - tensor.shape[-1])).contiguous()
    parts = padded.new_empty(num_ranks, *padded.shape)
    all_gather_single(parts.view(-1), padded.view(-1), group=group)
    pieces = [part.split([*own, longest - sum(own)], dim=-1) for part, own in zip(parts, lengths, strict=True)]
    # A new tensor, not a view: autograd refuses to change views that a Function returns in place, as by ReLU(inplace).
    return torch.cat([of_rank[number] for number in range(len(segments)) for of_rank in pieces], dim=-1)


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
    ranges = _ranges_of(rank, segments, num_ranks)
    return torch.cat([torch.arange(each.start, each.stop, device="cpu") for each in ranges])


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
