"""Close the TCP connections between ranks, so that their collectives over gloo end with an error.

`ProcessGroup.abort` does nothing for gloo: a rank that waits in a collective would wait until the timeout, or until the
ranks that it waits for have ended.
"""

import json
import os
import socket
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

Endpoints = tuple[tuple[str, int], tuple[str, int]]
"""The local and the remote address and port of a connection."""

_DESCRIPTORS = Path("/proc/self/fd")


def own_connections(excluded_ports: Iterable[int]) -> list[Endpoints]:
    """Return the TCP connections of this process, except those from or to `excluded_ports`. Empty except on Linux."""
    excluded = set(excluded_ports)
    return [
        (local, remote) for local, remote, _ in _connections() if local[1] not in excluded and remote[1] not in excluded
    ]


def close_connections(own: Iterable[Endpoints], others: Iterable[Endpoints]) -> int:
    """Shut down those connections of `own` of which `others` are the other ends; return their number."""
    wanted = {(remote, local) for local, remote in others} & set(own)
    closed = 0
    for local, remote, connection in _connections():
        if (local, remote) in wanted:
            with suppress(OSError):  # it was closed in the meantime
                connection.shutdown(socket.SHUT_RDWR)
                closed += 1
    return closed


def as_text(connections: list[Endpoints]) -> str:
    """Return `connections` as text for the store."""
    return json.dumps(connections)


def from_text(text: str) -> list[Endpoints]:
    """Return the connections that `as_text` wrote."""
    return [((local[0], local[1]), (remote[0], remote[1])) for local, remote in json.loads(text)]


def _connections() -> Iterator[tuple[Any, Any, socket.socket]]:
    if not _DESCRIPTORS.is_dir():
        return
    for name in os.listdir(_DESCRIPTORS):
        try:
            if not os.readlink(_DESCRIPTORS / name).startswith("socket:"):
                continue
            connection = socket.socket(fileno=os.dup(int(name)))
        except OSError:  # closed in the meantime
            continue
        with connection, suppress(OSError):  # not connected
            is_tcp = connection.type == socket.SOCK_STREAM
            if is_tcp and connection.family in (socket.AF_INET, socket.AF_INET6):
                yield _endpoint(connection.getsockname()), _endpoint(connection.getpeername()), connection


def _endpoint(address: tuple[Any, ...]) -> tuple[str, int]:
    """Return address and port, with an IPv4 address that a socket of IPv6 uses in the form of IPv4."""
    return str(address[0]).removeprefix("::ffff:"), address[1]
