"""Send and receive parts of tensors between the ranks of a group, and count the bytes that this rank sends.

They are counted exactly for our all-reduce functions, which are made of these messages, and by the kernel for
everything else::

    with count_traffic() as traffic:
        trainer.fit(model)
    print(traffic.payload_bytes, traffic.socket_bytes)
"""

import os
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple, TypeVar

import torch.distributed as dist
from torch import Tensor

from lightning_paral.distributed.failure import tcp_sockets

SEGMENT_BYTES = 3 * 1024 * 1024
"""Target size of a message. Small messages overlap addition with transfer, but each costs tenths of a ms on gloo."""
_TAG = 0x9A7A1  # keeps our messages apart from the user's own on gloo; NCCL has no tags
_Posted = TypeVar("_Posted")

# `struct tcp_info` of linux/tcp.h: offsets of the fields read below.
_NOTSENT_BYTES_AT = 144
_BYTES_SENT_AT = 200
_BYTES_RETRANSMITTED_AT = 208
_TCP_INFO_BYTES = 216


class Exchange(NamedTuple):
    """Messages in flight. Wait for `receives` before reading received tensors, for `sends` before reusing sent ones."""

    receives: list[dist.Work]
    sends: list[dist.Work]


def exchange(
    sends: Iterable[tuple[Tensor, int]],
    receives: Iterable[tuple[Tensor, int]],
    group: dist.ProcessGroup,
    phase: int = 0,
) -> Exchange:
    """Start sending and receiving contiguous tensors. *Collective* with the named peers.

    All messages form one NCCL group, so that two ranks that send to each other cannot deadlock.

    Args:
        sends: pairs of a tensor and the rank in `group` to send it to. Empty tensors are skipped.
        receives: pairs of a tensor and the rank in `group` to receive it from. Empty tensors are skipped.
        group: the process group of this rank and its peers.
        phase: a number added to the message tag on gloo. Messages between two ranks arrive in the order in which they
            were sent if they have the same phase.
    """
    sends = [(tensor, peer) for tensor, peer in sends if tensor.numel()]
    receives = [(tensor, peer) for tensor, peer in receives if tensor.numel()]
    for tensor, _ in sends:
        record_sent(tensor.numel() * tensor.element_size())
    messages = [*receives, *sends]
    if messages and messages[0][0].device.type != "cpu":
        operations = [(dist.irecv, *message) for message in receives] + [(dist.isend, *message) for message in sends]
        works = dist.batch_isend_irecv(
            [dist.P2POp(start, tensor, group=group, group_peer=peer, tag=_TAG) for start, tensor, peer in operations]
        )  # NCCL returns a single work
        return Exchange(receives=works, sends=works)
    # gloo does not group messages. Direct calls take 0.1 ms less than `batch_isend_irecv`.
    return Exchange(
        receives=[group.recv([tensor], peer, _TAG + phase) for tensor, peer in receives],
        sends=[group.send([tensor], peer, _TAG + phase) for tensor, peer in sends],
    )


def wait(*works: list[dist.Work]) -> None:
    """Wait for works of an `Exchange`. This blocks the thread on gloo, but only the current stream on NCCL."""
    for work in chain(*works):
        work.wait()


def run_pipeline(
    num_stages: int, depth: int, post: Callable[[int], _Posted], complete: Callable[[int, _Posted], None]
) -> None:
    """Run the stages of a pipeline with up to `depth` of them in flight.

    Stage `k` is posted after stage `k - depth` has completed, so it may reuse the buffers and use the result of that
    stage.

    Args:
        num_stages: the number of stages.
        depth: the maximum number of stages in flight.
        post: a function that starts the communication of stage `k`: `posted = post(k)`.
        complete: a function that waits for stage `k` and processes the received tensors: `complete(k, posted)`.
    """
    posted: deque[tuple[int, _Posted]] = deque()
    for stage in range(num_stages):
        if len(posted) == depth:
            complete(*posted.popleft())
        posted.append((stage, post(stage)))
    while posted:
        complete(*posted.popleft())


def balanced_cuts(start: int, length: int, num_parts: int) -> list[int]:
    """Divide the `length` elements that begin at `start` into `num_parts` ranges whose sizes differ by at most one.

    Returns:
        The list `cuts` of `num_parts + 1` bounds: part `i` is `[cuts[i], cuts[i + 1])`. Larger parts come first.
    """
    size, num_larger = divmod(length, num_parts)
    return [start + i * size + min(i, num_larger) for i in range(num_parts + 1)]


def num_segments(num_bytes: int) -> int:
    """Return the number of messages of about `SEGMENT_BYTES` for `num_bytes`, at least one."""
    return max(1, round(num_bytes / SEGMENT_BYTES))


@dataclass
class Traffic:
    """Bytes that one rank sends inside a `count_traffic` block. The numbers are final when the block ends."""

    payload_bytes: int = 0
    """The exact number of tensor bytes in point-to-point sends of `lightning_paral.comm`."""

    socket_bytes: int | None = None
    """Bytes sent by all TCP connections of this process, including gloo's message headers, without retransmissions.

    Covers everything that uses gloo: DDP's native reducer, FSDP, DeepSpeed. `None` if the kernel does not report it;
    Linux does since version 4.19. Messages of NCCL within a node are not counted, because they use no sockets.
    """


_counting_lock = threading.Lock()
_counting: list[Traffic] = []


@contextmanager
def count_traffic() -> Iterator[Traffic]:
    """Count the bytes that all threads of this process send inside the block. Blocks may be nested.

    Not a collective: each rank counts its own bytes. If sends may still be in flight, end the block with a barrier.
    """
    traffic = Traffic()
    before = _sent_by_connection()
    with _counting_lock:
        _counting.append(traffic)
    try:
        yield traffic
    finally:
        with _counting_lock:
            # Compare by identity: two blocks with equal counts are equal.
            _counting[:] = [other for other in _counting if other is not traffic]
        after = _sent_by_connection()
        if before is not None and after is not None:
            traffic.socket_bytes = sum(sent - before.get(inode, 0) for inode, sent in after.items())


def record_sent(num_bytes: int) -> None:
    """Add `num_bytes` of payload to every open `count_traffic` block."""
    if not _counting:
        return
    with _counting_lock:
        for traffic in _counting:
            traffic.payload_bytes += num_bytes


def _sent_by_connection() -> dict[int, int] | None:
    """Return the bytes sent so far by each open TCP connection of this process, by socket inode; `None` if unknown."""
    if not os.path.isdir("/proc/self/fd"):
        return None
    sent = {}
    for connection in tcp_sockets():
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
        if len(info) < _TCP_INFO_BYTES:
            return None
        (bytes_sent,) = struct.unpack_from("=Q", info, _BYTES_SENT_AT)
        (bytes_retransmitted,) = struct.unpack_from("=Q", info, _BYTES_RETRANSMITTED_AT)
        (bytes_waiting,) = struct.unpack_from("=I", info, _NOTSENT_BYTES_AT)
        sent[os.fstat(connection.fileno()).st_ino] = bytes_sent - bytes_retransmitted + bytes_waiting
    return sent
