"""Count the bytes that this rank sends: exactly for our all-reduce functions, from the kernel for everything else.

Example::

    with count_traffic() as traffic:
        trainer.fit(model)
    print(traffic.payload_bytes, traffic.socket_bytes)
"""

import os
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

# `struct tcp_info` of linux/tcp.h: offsets of the fields read below.
_NOTSENT_BYTES_AT = 144
_BYTES_SENT_AT = 200
_BYTES_RETRANSMITTED_AT = 208
_TCP_INFO_BYTES = 216


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
    for name in os.listdir("/proc/self/fd"):
        try:
            status = os.stat(f"/proc/self/fd/{name}")
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            connection = socket.socket(fileno=os.dup(int(name)))
        except OSError:  # closed since it was listed
            continue
        with connection:
            if connection.type != socket.SOCK_STREAM or connection.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
        if len(info) < _TCP_INFO_BYTES:
            return None
        (bytes_sent,) = struct.unpack_from("=Q", info, _BYTES_SENT_AT)
        (bytes_retransmitted,) = struct.unpack_from("=Q", info, _BYTES_RETRANSMITTED_AT)
        (bytes_waiting,) = struct.unpack_from("=I", info, _NOTSENT_BYTES_AT)
        sent[status.st_ino] = bytes_sent - bytes_retransmitted + bytes_waiting
    return sent
