"""Ring all-reduce: a reduce-scatter, then an all-gather, around a ring of ranks.

Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", J. Parallel Distrib. Comput.
69(2), 2009. The tensor is divided into N chunks, one per rank. In each of 2(N-1) steps, every rank sends one chunk to
its right neighbor and receives one from its left neighbor. In the first N-1 steps it adds the received chunk to its
own, so that every rank ends up with the sum of one chunk. In the last N-1 steps the sums are passed on.
"""

from collections import deque
from typing import Any

import torch.distributed as dist
from torch import Tensor

from lightning_paral.comm.point_to_point import Exchange, balanced_cuts, exchange, num_segments, run_pipeline, wait
from lightning_paral.comm.reduction import Reduction, as_all_reduce, native_all_reduce

_ALL_GATHER_PHASE = 1
LEAST_CHUNK_BYTES = 768 * 1024
"""The smallest chunk, in the dtype of the tensor, for which the ring is used among more than two ranks.

Each step of the ring costs the latency of a message. Over 4 nodes at 1 Gbit/s with bf16 on the wire, gloo's own
collectives were faster up to 2 MiB, and the ring from 4 MiB.
"""


@as_all_reduce
def ring_all_reduce(reduction: Reduction) -> None:
    """Reduce around a ring: an `AllReduce`. Partial sums and the result are rounded to the dtype on the wire.

    Cost: each rank sends 2(N-1) chunks of ceil(length / N) elements, the optimum for any N.
    Memory: one chunk for received messages and, with a narrower wire dtype, another one for messages to send; in this
    case on CPU two of each, if a chunk is sent as one segment. Adding one segment overlaps with the transfer of the
    next.
    """
    flat, rank, world_size = reduction.flat, reduction.rank, reduction.world_size
    chunk_cuts = balanced_cuts(0, flat.numel(), world_size)
    chunk_length = chunk_cuts[1]
    segments_per_chunk = num_segments(chunk_length * flat.element_size())
    cuts = [
        balanced_cuts(chunk_cuts[i], chunk_cuts[i + 1] - chunk_cuts[i], segments_per_chunk) for i in range(world_size)
    ]
    slot_cuts = balanced_cuts(0, chunk_length, segments_per_chunk)
    on_cpu = flat.device.type == "cpu"
    num_buffers = 2 if on_cpu and reduction.narrow_wire and segments_per_chunk == 1 else 1
    received = reduction.scratch(num_buffers * chunk_length)
    outgoing = reduction.scratch(num_buffers * chunk_length) if reduction.narrow_wire else None
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    last_sum = world_size - 2
    sending: deque[list[dist.Work]] = deque()

    def segment_of(chunk: int, segment: int) -> Tensor:
        chunk %= world_size
        return flat[cuts[chunk][segment] : cuts[chunk][segment + 1]]

    def slot(buffers: Tensor, stage: int, like: Tensor) -> Tensor:
        step, segment = divmod(stage, segments_per_chunk)
        start = step % num_buffers * chunk_length + slot_cuts[segment]
        return buffers[start : start + like.numel()]

    def receive_in_place(stage: int) -> list[dist.Work]:
        step, segment = divmod(stage, segments_per_chunk)
        target = segment_of(rank - step - 1, segment)
        return exchange([], [(target, left)], reduction.group, _ALL_GATHER_PHASE).receives

    num_stages = 2 * (world_size - 1) * segments_per_chunk  # a stage transfers one segment
    num_buffered = num_stages // 2 if outgoing is None else num_stages

    def buffer_of(stage: int) -> Tensor:
        step, segment = divmod(stage, segments_per_chunk)
        return slot(received, stage, like=segment_of(rank - step - 1, segment))

    def receive_in_buffer(stage: int) -> list[dist.Work]:
        return exchange([], [(buffer_of(stage), left)], reduction.group).receives

    # gloo sends data only after a ready-to-receive message from the receiver, which has to wait behind data in flight.
    # If a chunk is one message, each step would take twice as long. So with a narrow wire, the receive of a step is
    # posted before the data of the step before it is sent. In fp32 it made no difference over links of 1 Gbit/s.
    early_receives: deque[list[dist.Work]] = deque()
    if num_buffers == 2:
        early_receives.append(receive_in_buffer(0))
    # The receives of the all-gather are posted up front, directly into the output, if nothing has to be cast. This is
    # safe: the sum of a chunk is computed from the partial sum that it overwrites here, so it cannot arrive before
    # that partial sum has been sent.
    gather_receives = [receive_in_place(stage) for stage in range(num_buffered, num_stages)] if on_cpu else []

    def post(stage: int) -> tuple[Exchange, Tensor]:
        step, segment = divmod(stage, segments_per_chunk)
        message = segment_of(rank - step, segment)
        if outgoing is not None:
            if len(sending) == segments_per_chunk * num_buffers:
                wait(sending.popleft())  # the message that was sent from the same slot
            message = slot(outgoing, stage, like=message).copy_(message)
        if stage >= num_buffered and on_cpu:  # the sum of a chunk, received in place
            sent = exchange([(message, right)], [], reduction.group, _ALL_GATHER_PHASE).sends
            posted, arriving = Exchange(receives=gather_receives[stage - num_buffered], sends=sent), message
        elif early_receives:
            if stage + 1 < num_buffered:
                early_receives.append(receive_in_buffer(stage + 1))
            sent = exchange([(message, right)], [], reduction.group).sends
            posted, arriving = Exchange(receives=early_receives.popleft(), sends=sent), buffer_of(stage)
        else:
            # Anything that must be added or cast is received in a buffer.
            arriving = buffer_of(stage) if stage < num_buffered else segment_of(rank - step - 1, segment)
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


def all_reduce_by_size(tensor: Tensor, group: dist.ProcessGroup | None = None, **options: Any) -> Tensor:
    """Reduce by the ring, or by `native_all_reduce` if `tensor` is small: an `AllReduce`. All ranks choose alike."""
    num_bytes, world_size = tensor.numel() * tensor.element_size(), dist.get_world_size(group)
    suits_ring = world_size <= 2 or num_bytes >= world_size * LEAST_CHUNK_BYTES
    return (ring_all_reduce if suits_ring else native_all_reduce)(tensor, group, **options)
