"""All-to-all all-reduce: every rank sends the full tensor to all others, and adds what it receives.

It needs one round of messages and no root, but each rank sends the tensor N-1 times. It suits few ranks and small
tensors.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_paral.comm.chunks import balanced_cuts, num_segments
from lightning_paral.comm.point_to_point import Exchange, exchange, run_pipeline, wait
from lightning_paral.comm.reduction import plan_reduction

_DEPTH = 2


def all_to_all_all_reduce(
    tensor: Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
    wire_dtype: torch.dtype | None = None,
) -> Tensor:
    """Replace `tensor` by its sum or average over `group`, bit-identical on all ranks. *Collective* over `group`.

    Cost: every rank sends the tensor N-1 times.
    Memory: at most one chunk, 1/N of the tensor (or two elements from each rank, if that is more).

    Arguments, result and errors are those of `ring_all_reduce`. Every rank adds the contributions in the order of
    ranks. A narrower wire dtype rounds the contributions but not the result.
    """
    reduction = plan_reduction(tensor, group, op, wire_dtype)
    flat, rank, world_size = reduction.flat, reduction.rank, reduction.world_size
    if world_size == 1 or not flat.numel():
        return tensor
    reduction.prepare()

    min_parts = world_size * world_size * _DEPTH  # makes the segments in flight fit into one chunk
    num_parts = max(num_segments(flat.numel() * reduction.wire_dtype.itemsize), min_parts)
    cuts = balanced_cuts(0, flat.numel(), min(num_parts, flat.numel()))
    contributions = reduction.scratch(_DEPTH * world_size * cuts[1]).view(_DEPTH, world_size, cuts[1])
    peers = [peer for peer in range(world_size) if peer != rank]

    def post(stage: int) -> tuple[Tensor, Exchange]:
        segment = flat[cuts[stage] : cuts[stage + 1]]
        arriving = contributions[stage % _DEPTH, :, : segment.numel()]
        mine = arriving[rank].copy_(segment)
        works = exchange([(mine, peer) for peer in peers], [(arriving[peer], peer) for peer in peers], reduction.group)
        return arriving, works

    def complete(stage: int, posted: tuple[Tensor, Exchange]) -> None:
        segment = flat[cuts[stage] : cuts[stage + 1]]
        arrived, works = posted
        wait(*works)
        segment.copy_(arrived[0])
        for contribution in arrived[1:]:
            segment.add_(contribution)
        reduction.finish(segment)

    run_pipeline(len(cuts) - 1, _DEPTH, post, complete)
    return tensor
