"""Reduce and broadcast: every rank sends its tensor to the root, which adds them up and sends the sum back.

This is the textbook all-reduce. The other algorithms avoid its bottleneck: the root receives and sends N-1 tensors.
"""

from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_paral.comm.chunks import balanced_cuts, num_segments
from lightning_paral.comm.point_to_point import exchange, wait
from lightning_paral.comm.reduction import Reduction, plan_reduction

_ROOT = 0


def reduce_broadcast_all_reduce(
    tensor: Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
    wire_dtype: torch.dtype | None = None,
) -> Tensor:
    """Replace `tensor` by its sum or average over `group`, bit-identical on all ranks. *Collective* over `group`.

    Cost: the root (rank 0 of the group) sends the tensor N-1 times, every other rank once.
    Memory: at most one chunk, 1/N of the tensor (or one element from each rank, if that is more).

    Arguments, result and errors are those of `ring_all_reduce`. The root adds in the order of ranks.
    """
    reduction = plan_reduction(tensor, group, op, wire_dtype)
    if reduction.world_size > 1 and tensor.numel():
        reduction.prepare()
        segments = _cut_into_segments(reduction)
        if reduction.rank == _ROOT:
            _reduce_and_send(reduction, segments)
        else:
            _send_and_wait(reduction, segments)
    return tensor


def _cut_into_segments(reduction: Reduction) -> list[Tensor]:
    """Divide the tensor so that one segment from every rank fits into one chunk. The first segment is the largest."""
    length, world_size = reduction.flat.numel(), reduction.world_size
    num_parts = max(num_segments(length * reduction.wire_dtype.itemsize), world_size * world_size)
    cuts = balanced_cuts(0, length, min(num_parts, length))
    return [reduction.flat[start:end] for start, end in pairwise(cuts)]


def _reduce_and_send(reduction: Reduction, segments: list[Tensor]) -> None:
    """On the root: send back the sum of each segment while the next segment arrives."""
    peers = range(1, reduction.world_size)
    largest = segments[0].numel()
    received = reduction.scratch(len(peers) * largest).view(len(peers), largest)
    rounded = reduction.scratch(largest)[: largest if reduction.narrow_wire else 0]
    sums: list[tuple[Tensor, int]] = []
    for segment in segments:
        arriving = received[:, : segment.numel()]
        wait(*exchange(sums, [(arriving[peer - 1], peer) for peer in peers], reduction.group))
        for contribution in arriving:
            segment.add_(contribution)
        reduction.finish(segment)
        total = segment
        if reduction.narrow_wire:
            total = rounded[: segment.numel()].copy_(segment)
            segment.copy_(total)
        sums = [(total, peer) for peer in peers]
    wait(*exchange(sums, [], reduction.group))


def _send_and_wait(reduction: Reduction, segments: list[Tensor]) -> None:
    """On the other ranks: send each segment while the sum of the previous one arrives and replaces it."""
    awaited: Tensor | None = None
    for segment in segments:
        outgoing = segment.to(reduction.wire_dtype)
        _send_and_receive(reduction, outgoing, awaited)
        awaited = segment
    _send_and_receive(reduction, None, awaited)


def _send_and_receive(reduction: Reduction, outgoing: Tensor | None, total: Tensor | None) -> None:
    sends = [(outgoing, _ROOT)] if outgoing is not None else []
    arriving = reduction.scratch(total.numel()) if total is not None and reduction.narrow_wire else total
    wait(*exchange(sends, [(arriving, _ROOT)] if arriving is not None else [], reduction.group))
    if total is not None and arriving is not None and arriving is not total:
        total.copy_(arriving)
