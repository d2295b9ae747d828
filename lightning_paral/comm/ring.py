"""Ring all-reduce: a reduce-scatter, then an all-gather, around a ring of ranks.

Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", J. Parallel Distrib. Comput.
69(2), 2009. The tensor is divided into N chunks, one per rank. In each of 2(N-1) steps, every rank sends one chunk to
its right neighbor and receives one from its left neighbor. In the first N-1 steps it adds the received chunk to its
own, so that every rank ends up with the sum of one chunk. In the last N-1 steps the sums are passed on.
"""

from collections import deque

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_paral.comm.chunks import SEGMENT_BYTES, balanced_cuts, num_segments
from lightning_paral.comm.point_to_point import Exchange, exchange, run_pipeline, wait
from lightning_paral.comm.reduction import plan_reduction

_ALL_GATHER_PHASE = 1


def ring_all_reduce(
    tensor: Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
    wire_dtype: torch.dtype | None = None,
    segment_bytes: int = SEGMENT_BYTES,
) -> Tensor:
    """Replace `tensor` by its sum or average over `group`, bit-identical on all ranks. *Collective* over `group`.

    Cost: each rank sends 2(N-1) chunks of ceil(length / N) elements, the optimum for any N.
    Memory: one chunk for received messages and, with a narrower wire dtype, another one for messages to send.

    Args:
        tensor: a contiguous tensor of any shape, floating point or integer. It is reduced in place.
        group: the ranks that take part; `None` for the default group.
        op: `ReduceOp.SUM` or `ReduceOp.AVG`.
        wire_dtype: the floating-point dtype of the messages; `None` for the dtype of `tensor`. Additions are done in
            the dtype of `tensor`; partial sums and the result are rounded to `wire_dtype`.
        segment_bytes: the approximate size, in the dtype of `tensor`, of the segments in which a chunk is sent. Adding
            one segment overlaps with the transfer of the next.

    Returns:
        `tensor`.

    Raises:
        ConfigurationError: `op` is neither SUM nor AVG, `tensor` is not contiguous, or `wire_dtype` is given and
            `tensor` or `wire_dtype` is not floating point.
    """
    reduction = plan_reduction(tensor, group, op, wire_dtype)
    flat, rank, world_size = reduction.flat, reduction.rank, reduction.world_size
    if world_size == 1:
        return tensor
    reduction.prepare()

    chunk_cuts = balanced_cuts(0, flat.numel(), world_size)
    chunk_length = chunk_cuts[1]
    segments_per_chunk = num_segments(chunk_length * flat.element_size(), segment_bytes)
    cuts = [
        balanced_cuts(chunk_cuts[i], chunk_cuts[i + 1] - chunk_cuts[i], segments_per_chunk) for i in range(world_size)
    ]
    slot_cuts = balanced_cuts(0, chunk_length, segments_per_chunk)
    received = reduction.scratch(chunk_length)
    outgoing = reduction.scratch(chunk_length) if reduction.narrow_wire else None
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    last_sum = world_size - 2
    sending: deque[list[dist.Work]] = deque()

    def segment_of(chunk: int, segment: int) -> Tensor:
        chunk %= world_size
        return flat[cuts[chunk][segment] : cuts[chunk][segment + 1]]

    def slot(buffer: Tensor, segment: int, like: Tensor) -> Tensor:
        return buffer[slot_cuts[segment] : slot_cuts[segment] + like.numel()]

    def receive_in_place(stage: int) -> list[dist.Work]:
        step, segment = divmod(stage, segments_per_chunk)
        target = segment_of(rank - step - 1, segment)
        return exchange([], [(target, left)], reduction.group, _ALL_GATHER_PHASE).receives

    num_stages = 2 * (world_size - 1) * segments_per_chunk  # a stage transfers one segment
    # gloo's ready-to-receive message has to wait behind data in flight, so post the all-gather receives up front,
    # directly into the output. This is safe: the sum of a chunk is computed from the partial sum that it overwrites
    # here, so it cannot arrive before that partial sum has been sent.
    early_receives: deque[list[dist.Work]] = deque()
    if flat.device.type == "cpu" and outgoing is None:
        early_receives.extend(receive_in_place(stage) for stage in range(num_stages // 2, num_stages))

    def post(stage: int) -> tuple[Exchange, Tensor]:
        step, segment = divmod(stage, segments_per_chunk)
        message = segment_of(rank - step, segment)
        if outgoing is not None:
            if len(sending) == segments_per_chunk:
                wait(sending.popleft())  # the message that was sent from the same slot
            message = slot(outgoing, segment, like=message).copy_(message)
        target = segment_of(rank - step - 1, segment)
        # The sum of a chunk is received in place. Anything that must be added or cast is received in a buffer.
        arriving = target if step > last_sum and outgoing is None else slot(received, segment, like=target)
        if step > last_sum and early_receives:
            sent = exchange([(message, right)], [], reduction.group, _ALL_GATHER_PHASE).sends
            posted = Exchange(receives=early_receives.popleft(), sends=sent)
        else:
            posted = exchange([(message, right)], [(arriving, left)], reduction.group)
        sending.append(posted.sends)
        return posted, arriving

    def complete(stage: int, posted: tuple[Exchange, Tensor]) -> None:
        step, segment = divmod(stage, segments_per_chunk)
        messages, arrived = posted
        wait(messages.receives)
        target = segment_of(rank - step - 1, segment)
        if step <= last_sum:
            target.add_(arrived)
            if step == last_sum:
                reduction.finish(target)
                if reduction.narrow_wire:
                    # The other ranks receive the rounded sum, so this rank must also round it.
                    target.copy_(target.to(reduction.wire_dtype))
        elif reduction.narrow_wire:
            target.copy_(arrived)

    run_pipeline(num_stages, depth=segments_per_chunk, post=post, complete=complete)
    wait(*sending)
    return tensor
