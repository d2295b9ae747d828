"""All-reduce algorithms that send directly: reduce and broadcast, all-to-all, and an average in 8-bit integers.

In the first, every rank sends its tensor to the root, which adds them up and sends the sum back: the root receives and
sends N-1 tensors. In the second, every rank sends its tensor to all others, and adds what it receives: it needs one
round of messages and no root, but each rank sends the tensor N-1 times. It suits few ranks and small tensors. The last
sends each rank its chunk, with a scale for each block, and carries over the rounding error.
"""

from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_paral.comm.point_to_point import Exchange, balanced_cuts, exchange, num_segments, run_pipeline, wait
from lightning_paral.comm.reduction import Reduction, as_all_reduce, plan_reduction

_ROOT = 0
_STAGES = 2
"""Segments in flight at once in the all-to-all."""
BLOCK = 512
"""Elements that share a scale. It is an fp32 number, so a message has 1 + 4 / 512 bytes per element."""
_LARGEST = 127
_SCALE_BYTES = 4


@as_all_reduce
def reduce_broadcast_all_reduce(reduction: Reduction) -> None:
    """Reduce to the root, and broadcast the sum: an `AllReduce`. The root adds in the order of ranks.

    Cost: the root (rank 0 of the group) sends the tensor N-1 times, every other rank once.
    Memory: at most one chunk, 1/N of the tensor (or one element from each rank, if that is more).
    """
    cuts = _cuts(reduction, reduction.world_size**2)  # a segment from every rank fits into one chunk
    segments = [reduction.flat[start:end] for start, end in pairwise(cuts)]
    (_reduce_and_send if reduction.rank == _ROOT else _send_and_receive)(reduction, segments)


def _cuts(reduction: Reduction, min_parts: int) -> list[int]:
    """Return the bounds of at least `min_parts` segments, of which the first is the largest."""
    length = reduction.flat.numel()
    num_parts = max(num_segments(length * reduction.wire_dtype.itemsize), min_parts)
    return balanced_cuts(0, length, min(num_parts, length))


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


def _send_and_receive(reduction: Reduction, segments: list[Tensor]) -> None:
    """On the other ranks: send each segment while the sum of the previous one arrives and replaces it."""
    nothing = reduction.flat[:0]  # is neither sent nor received
    for awaited, outgoing in pairwise([nothing, *segments, nothing]):
        arriving = reduction.scratch(awaited.numel()) if reduction.narrow_wire else awaited
        wait(*exchange([(outgoing.to(reduction.wire_dtype), _ROOT)], [(arriving, _ROOT)], reduction.group))
        if reduction.narrow_wire:
            awaited.copy_(arriving)


@as_all_reduce
def all_to_all_all_reduce(reduction: Reduction) -> None:
    """Send every tensor to every rank, which adds them in the order of ranks: an `AllReduce`.

    Cost: every rank sends the tensor N-1 times.
    Memory: at most one chunk, 1/N of the tensor (or two elements from each rank, if that is more).

    A narrower wire dtype rounds the contributions but not the result.
    """
    flat, rank, world_size = reduction.flat, reduction.rank, reduction.world_size
    cuts = _cuts(reduction, world_size**2 * _STAGES)  # the segments in flight fit into one chunk
    contributions = reduction.scratch(_STAGES * world_size * cuts[1]).view(_STAGES, world_size, cuts[1])
    peers = [peer for peer in range(world_size) if peer != rank]

    def post(stage: int) -> tuple[Tensor, Exchange]:
        segment = flat[cuts[stage] : cuts[stage + 1]]
        arriving = contributions[stage % _STAGES, :, : segment.numel()]
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

    run_pipeline(len(cuts) - 1, _STAGES, post, complete)


def int8_average(tensor: Tensor, error: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Replace `tensor` by its average over `group`, bit-identical on all ranks. *Collective* over `group`.

    Each rank rounds `tensor + error` and keeps what rounding has removed in `error`, so that it is sent the next time:
    Seide et al., "1-Bit Stochastic Gradient Descent", Interspeech 2014. Each rank adds up a chunk, rounds the average,
    and keeps the error of that as well.

    Cost: each rank sends 2(N-1) chunks of ceil(length / N) elements, rounded up to blocks.
    Memory: about three copies of the tensor.

    Args:
        tensor: a contiguous floating-point tensor. It is averaged in place.
        error: a tensor like it, zero at first, which belongs to this rank. It is updated in place.
        group: the ranks that take part; `None` for the default group.

    Returns:
        `tensor`.
    """
    reduction = plan_reduction(tensor, group, dist.ReduceOp.AVG, None)
    flat, rank, world_size = reduction.flat, reduction.rank, reduction.world_size
    if world_size == 1 or not flat.numel():
        return tensor
    peers = [peer for peer in range(world_size) if peer != rank]
    num_padding = -flat.numel() % (world_size * BLOCK)
    wanted = torch.nn.functional.pad(flat + error.view(-1), (0, num_padding)).view(world_size, -1, BLOCK)
    messages = _rounded(wanted)
    left = wanted - _values(messages, flat.dtype)
    received = torch.empty_like(messages)
    received[rank] = messages[rank]
    receives = [(received[peer], peer) for peer in peers]
    wait(*exchange([(messages[peer], peer) for peer in peers], receives, reduction.group))
    average = _values(received, flat.dtype).mean(dim=0)
    received[rank] = _rounded(average)
    left[rank].add_(average.sub_(_values(received[rank], flat.dtype)), alpha=world_size)
    wait(*exchange([(received[rank], peer) for peer in peers], receives, reduction.group))
    flat.copy_(_values(received, flat.dtype).view(-1)[: flat.numel()])
    error.view(-1).copy_(left.view(-1)[: flat.numel()])
    return tensor


def _rounded(values: Tensor) -> Tensor:
    """Return the bytes of `values`, shape `[..., blocks, BLOCK]`, each block with its scale in front."""
    scales = values.abs().amax(dim=-1, keepdim=True).div(_LARGEST).to(torch.float32)
    rounded = values.div(scales.where(scales != 0, 1)).round().clamp(-_LARGEST, _LARGEST).to(torch.int8)
    return torch.cat([scales.view(torch.uint8), rounded.view(torch.uint8)], dim=-1)


def _values(message: Tensor, dtype: torch.dtype) -> Tensor:
    scales = message[..., :_SCALE_BYTES].contiguous().view(torch.float32)
    return message[..., _SCALE_BYTES:].view(torch.int8).to(dtype) * scales.to(dtype)
