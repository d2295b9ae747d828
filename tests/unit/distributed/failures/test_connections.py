"""Connections between ranks are found from what both ends say, and closed; all others stay open."""

import os
import socket

import pytest

from lightning_paral.distributed.failures.connections import as_text, close_connections, from_text, own_connections

pytestmark = pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs Linux")


def connection_pair() -> tuple[socket.socket, socket.socket, int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        theirs, _ = server.accept()
        return ours, theirs, server.getsockname()[1]


def test_only_connections_of_which_the_other_rank_has_the_other_end_are_closed() -> None:
    ours, theirs, _ = connection_pair()
    users, service, _ = connection_pair()
    with ours, theirs, users, service:
        own = own_connections([])
        other_rank = [(theirs.getsockname(), theirs.getpeername())]
        assert (ours.getsockname(), ours.getpeername()) in own

        assert close_connections(own, from_text(as_text(other_rank))) == 1

        theirs.settimeout(20)
        assert theirs.recv(1) == b""
        users.sendall(b"x")
        service.settimeout(20)
        assert service.recv(1) == b"x"
