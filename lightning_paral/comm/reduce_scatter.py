"""Reduce-scatter and reduce in which every rank sends its contribution directly to the rank that needs the sum.

gloo has no reduce-scatter of its own. torch replaces it by an all-reduce, which sends twice as much, and discards most
of the result.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_paral.comm.point_to_point import exchange, wait


def direct_reduce_scatter(output: Tensor, tensor: Tensor, group: dist.ProcessGroup) -> None:
    """Write this rank's chunk of the sum of `tensor` over `group` to `output`. *Collective* over `group`.

    Cost: each rank sends (N-1)/N of `tensor`, the optimum. Memory: N-1 chunks. Adds in the order of ranks.

    Args:
        output: a contiguous tensor with 1/N of the elements of `tensor`. It may be this rank's chunk of `tensor`.
        tensor: a contiguous tensor whose number of elements is divisible by N. It is not changed unless `output` is
            part of it.
        group: the ranks that take part.
    """
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    chunks = tensor.view(-1).chunk(world_size)
    peers = [peer for peer in range(world_size) if peer != rank]
    received = tensor.new_empty(len(peers), chunks[rank].numel())
    arriving = dict(zip(peers, received, strict=True))
    sends = [(chunks[peer], peer) for peer in peers]
    wait(*exchange(sends, [(arriving[peer], peer) for peer in peers], group))
    arriving[rank] = chunks[rank].clone()
    total = arriving[0]
    for contributor in range(1, world_size):
        total = total.add_(arriving[contributor])
    output.view(-1).copy_(total)


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
