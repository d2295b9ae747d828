"""Which connections a rank closes to end its collectives."""

import os
import select
import socket
import traceback

from lightning_paral.compat.torch.process_groups import close_connections


def connected() -> tuple[socket.socket, socket.socket, int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
        return near, far, server.getsockname()[1]


def is_open(connection: socket.socket) -> bool:
    return not select.select([connection], [], [], 0)[0]


def test_connections_are_closed_but_not_those_to_the_store_nor_inherited_ones() -> None:
    inherited = connected()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            local, remote = socket.socketpair()
            between_ranks, to_store = connected(), connected()
            close_connections(store_port=to_store[2])
            found = [is_open(each) for each in (inherited[0], between_ranks[0], to_store[0], local, remote)]
            status = 0 if found == [True, False, True, True, True] else 2
        except BaseException:
            traceback.print_exc()
        os._exit(status)
    _, status = os.waitpid(child, 0)

    assert os.waitstatus_to_exitcode(status) == 0
    assert is_open(inherited[0])
    for connection in inherited[:2]:
        connection.close()
