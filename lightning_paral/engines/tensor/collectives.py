"""Which part of a tensor each rank has, and the differentiable collectives between parts and full tensors.

These are the conjugate operators f and g of Shoeybi et al., "Megatron-LM", arXiv:1909.08053, and those between split
and full activations. Copy and sum are each other's backward pass, and so are gather and split: second derivatives are
exact as well. Each is *collective* over `group` in the forward pass, the backward pass, or both, as its docstring says.
All ranks of `group` must have the same gradient of a full tensor.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_paral.compat.torch.process_groups import all_gather_single


@dataclass(frozen=True)
class Layout:
    """The dimension in which a tensor is split, and the segments of this dimension.

    The dimension consists of segments one after another, such as the queries, the keys and the values that one linear
    layer computes. Each rank has its `range_of` each segment.
    """

    dim: int
    """Counted from the first dimension."""
    segments: tuple[int, ...]
    """The full sizes of the segments."""

    @property
    def size(self) -> int:
        """The full size of the dimension."""
        return sum(self.segments)

    def is_even(self, num_ranks: int) -> bool:
        """Return whether all ranks have the same number of elements of each segment, which is at least one."""
        return all(size and size % num_ranks == 0 for size in self.segments)

    def is_one_run(self, num_ranks: int) -> bool:
        """Return whether each rank has the same number of consecutive elements."""
        return len(self.segments) == 1 and self.is_even(num_ranks)


def gather_parts(local: Tensor, layout: Layout, group: dist.ProcessGroup) -> Tensor:
    """Return the full tensor of which each rank has the part `local`. *Collective* in the forward pass."""
    full = _apply(_Gather, *_rows(local.movedim(layout.dim, -1), layout.segments), group).flatten(local.ndim - 1)
    return full.movedim(-1, layout.dim).contiguous()  # code may call `view`


def own_parts(full: Tensor, layout: Layout, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's part of `full`, which is equal on all ranks. *Collective* in the backward pass."""
    own = _apply(_Split, *_rows(full.movedim(layout.dim, -1), layout.segments), group).flatten(full.ndim - 1)
    return own.movedim(-1, layout.dim).contiguous()


def copy_to_ranks(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return `tensor`, equal on all ranks, for each rank to compute with; its gradients are summed over the ranks.

    *Collective* in the backward pass.
    """
    return _apply(_Copy, tensor, group)


def sum_over_ranks(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum of the ranks' tensors. *Collective* in the forward pass."""
    return _apply(_Sum, tensor, group)


def exchange_rows(rows: Tensor, segments: tuple[int, ...], group: dist.ProcessGroup) -> Tensor:
    """Return this rank's part of each segment, from tensors of which each rank has consecutive rows. *Collective*.

    For example, one weight computes queries, keys and values. If 2 ranks have half of its rows each, the first has the
    rows for queries and for half of the keys. It gets half of the rows for each of the three instead.

    Args:
        rows: this rank's `own_range` of the first dimension, of size `sum(segments)`.
        segments: the sizes of the segments. The number of ranks divides each of them.
        group: the ranks.
    """
    order, sends, receives = _plan(segments, dist.get_rank(group), dist.get_world_size(group), rows.device)
    return _apply(_Exchange, rows.index_select(0, order), sends, receives, group)


def own_range(size: int, group: dist.ProcessGroup) -> slice:
    """Return the indices among `size` that belong to this rank, divided as by `torch.chunk` and DTensor's `Shard`."""
    return range_of(dist.get_rank(group), size, dist.get_world_size(group))


def range_of(rank: int, size: int, num_ranks: int) -> slice:
    """Return the indices, among `size`, that belong to `rank` of `num_ranks`. The last ranks may have fewer or none."""
    length = -(-size // num_ranks)
    return slice(min(rank * length, size), min((rank + 1) * length, size))


def _apply(function: type[torch.autograd.Function], *args: Any) -> Tensor:
    result: Tensor = function.apply(*args)  # type: ignore[no-untyped-call]
    return result


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
        summed = tensor.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(summed, group=group)
        return summed

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return copy_to_ranks(gradient, ctx.group), None


# Parts of the last dimension

_Segments = tuple[int, ...]


def _rows(tensor: Tensor, segments: _Segments) -> tuple[Tensor, _Segments]:
    """Return equal segments, such as logits that are viewed as one row, as rows: the place of each is not needed."""
    if len(segments) == 1 or len({*segments}) > 1:
        return tensor, segments
    return tensor.reshape(*tensor.shape[:-1], len(segments), tensor.shape[-1] // len(segments)), segments[:1]


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, segments: _Segments, group: dist.ProcessGroup) -> Tensor:
        ctx.segments, ctx.group = segments, group
        num_ranks = dist.get_world_size(group)
        places = [_places(rank, segments, num_ranks, tensor.device) for rank in range(num_ranks)]
        own = torch.nn.functional.pad(tensor, (0, len(places[0]) - tensor.shape[-1])).contiguous()
        parts = own.new_empty(num_ranks, *own.shape)
        all_gather_single(parts.view(-1), own.view(-1), group=group)
        # A new tensor, not a view: autograd refuses to change views that a Function returns in place, as by
        # ReLU(inplace=True).
        joined = torch.cat([part[..., : len(own)] for part, own in zip(parts, places, strict=True)], dim=-1)
        return joined if len(segments) == 1 else joined[..., _order(segments, num_ranks, tensor.device)]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _apply(_Split, gradient, ctx.segments, ctx.group), None, None


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, segments: _Segments, group: dist.ProcessGroup) -> Tensor:
        ctx.segments, ctx.group = segments, group
        if len(segments) == 1:
            return tensor[..., own_range(segments[0], group)].clone(memory_format=torch.contiguous_format)
        return tensor[..., _places(dist.get_rank(group), segments, dist.get_world_size(group), tensor.device)]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _apply(_Gather, gradient, ctx.segments, ctx.group), None, None


@lru_cache
def _places(rank: int, segments: _Segments, num_ranks: int, device: torch.device) -> Tensor:
    """Return the places in a dimension of several segments that belong to `rank`, in order."""
    pieces = torch.split(torch.arange(sum(segments), device=device), list(segments))
    return torch.cat([piece[range_of(rank, len(piece), num_ranks)] for piece in pieces])


@lru_cache
def _order(segments: _Segments, num_ranks: int, device: torch.device) -> Tensor:
    """Return where each element of the full dimension is among the parts of the ranks, one after another."""
    return torch.cat([_places(rank, segments, num_ranks, device) for rank in range(num_ranks)]).argsort()


# Exchange of rows


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, sends: list[int], receives: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.sizes, ctx.group = (receives, sends), group
        received = rows.new_empty(sum(receives), *rows.shape[1:])
        dist.all_to_all_single(received, rows.contiguous(), receives, sends, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return _apply(_Exchange, gradient, *ctx.sizes, ctx.group), None, None, None


@lru_cache
def _plan(segments: _Segments, rank: int, num_ranks: int, device: torch.device) -> tuple[Tensor, list[int], list[int]]:
    """Return the order in which `rank` sends its rows, how many it sends to each rank, and how many it gets from each.

    Rows arrive in the order of the full tensor, since each rank has consecutive ones.
    """
    length, cpu = sum(segments) // num_ranks, torch.device("cpu")
    with torch.inference_mode(False):  # autograd saves the order
        wanted = [_places(each, segments, num_ranks, cpu).clone() for each in range(num_ranks)]
        sent = [rows[rows // length == rank] - rank * length for rows in wanted]
        order = torch.cat(sent).to(device)
    return order, [len(rows) for rows in sent], (wanted[rank] // length).bincount(minlength=num_ranks).tolist()
