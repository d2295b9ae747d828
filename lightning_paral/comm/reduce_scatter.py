"""Reduce-scatter and reduce in which every rank sends its contribution directly to the rank that needs the sum.

gloo has no reduce-scatter of its own. torch replaces it by an all-reduce, which sends twice as much, and discards most
of the result. `gather_rows` and `sum_to_rows` are differentiable: each is the other's backward pass, so second
derivatives are exact as well.
"""

from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_paral.comm.point_to_point import Exchange, exchange, run_pipeline, wait
from lightning_paral.compat.torch.process_groups import all_gather_single, reduce_scatter_single

_DEPTH = 2

ARRIVING_BYTES: Final = 8 * 2**20
"""What `direct_reduce_scatter` receives at a time, in two parts: one arrives while the other is added."""


def sum_of_own_chunk(chunks: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum over `group` of this rank's chunk, on gloo by `direct_reduce_scatter`. *Collective* over `group`.

    Args:
        chunks: shape `[N, ...]`, contiguous: a chunk for each of the N ranks.
        group: the ranks that take part.
    """
    own = torch.empty_like(chunks[0])
    # gloo sends no complex numbers.
    output, tensor = (torch.view_as_real(each) if own.is_complex() else each for each in (own, chunks))
    if chunks.device.type == "cpu":
        direct_reduce_scatter(output.view(-1), tensor.view(-1), group)
    else:
        reduce_scatter_single(output.view(-1), tensor.view(-1), group=group)
    return own


def direct_reduce_scatter(output: Tensor, tensor: Tensor, group: dist.ProcessGroup) -> None:
    """Write this rank's chunk of the sum of `tensor` over `group` to `output`. *Collective* over `group`.

    Cost: each rank sends (N-1)/N of `tensor`, the optimum. Memory: what arrives, at most `ARRIVING_BYTES`. Adds in the
    order of ranks.

    Args:
        output: a contiguous tensor with 1/N of the elements of `tensor`. It may be this rank's chunk of `tensor`.
        tensor: a contiguous tensor whose number of elements is divisible by N. It is not changed unless `output` is
            part of it.
        group: the ranks that take part.
    """
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    chunks, result = tensor.view(world_size, output.numel()), output.view(-1)
    peers = [peer for peer in range(world_size) if peer != rank]
    length = max(1, ARRIVING_BYTES // (_DEPTH * max(1, len(peers)) * tensor.element_size()))
    num_pieces = -(-result.numel() // length)
    buffers = tensor.new_empty(min(_DEPTH, num_pieces), len(peers), min(length, result.numel()))

    def post(number: int) -> tuple[slice, dict[int, Tensor], Exchange]:
        piece = slice(number * length, (number + 1) * length)
        size = result[piece].numel()
        arriving = {peer: buffers[number % _DEPTH, slot, :size] for slot, peer in enumerate(peers)}
        sends = [(chunks[peer, piece], peer) for peer in peers]
        return piece, arriving, exchange(sends, [(arriving[peer], peer) for peer in peers], group)

    def complete(_: int, posted: tuple[slice, dict[int, Tensor], Exchange]) -> None:
        piece, arriving, messages = posted
        wait(*messages)
        _sum_in_order(result[piece], {**arriving, rank: chunks[rank, piece]}, rank)

    run_pipeline(num_pieces, _DEPTH, post, complete)


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


def _sum_in_order(result: Tensor, contributions: dict[int, Tensor], rank: int) -> None:
    """Write the sum to `result`, which may be the memory of the own contribution. Changes that of rank 0."""
    if rank == 0:
        total = result.copy_(contributions[0])  # does nothing if they are the same memory
    else:
        total = contributions[0]
    for contributor in range(1, len(contributions)):
        total.add_(contributions[contributor])
    if rank > 0:
        result.copy_(total)  # after the last use of the own contribution, which may be the same memory


def start_reduce(tensor: Tensor, target: int, group: dist.ProcessGroup) -> list[dist.Work]:
    """Replace `tensor` on rank `target` of `group` by the sum over `group`. *Collective* over `group`.

    The target returns when the sum is complete. The other ranks return immediately, so that reductions to several
    targets overlap.

    Returns:
        Works to wait for before overwriting `tensor`. On the target, the list is empty.
    """
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    if rank != target:
        return exchange([(tensor, target)], [], group).sends
    peers = [peer for peer in range(world_size) if peer != rank]
    received = torch.empty((len(peers), *tensor.shape), dtype=tensor.dtype, device=tensor.device)
    wait(*exchange([], list(zip(received, peers, strict=True)), group))
    for contribution in received:
        tensor.add_(contribution)
    return []


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
