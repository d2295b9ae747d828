"""Which connections a rank closes to end its collectives."""

import select
import socket

from lightning_paral.distributed.failure import close_connections, own_endpoints


def connected() -> tuple[socket.socket, socket.socket, int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
        return near, far, server.getsockname()[1]


def address(connection: socket.socket) -> str:
    return "{}:{}".format(*connection.getsockname())


def is_open(connection: socket.socket) -> bool:
    return not select.select([connection], [], [], 0)[0]


def test_connections_to_other_ranks_are_closed_but_no_others() -> None:
    between_ranks, of_a_logger, to_store = connected(), connected(), connected()
    others = [address(each[1]) for each in (between_ranks, to_store)]

    own = own_endpoints(store_port=to_store[2])
    close_connections(others, store_port=to_store[2])

    assert address(between_ranks[0]) in own
    assert address(to_store[0]) not in own
    assert [is_open(each[0]) for each in (between_ranks, of_a_logger, to_store)] == [False, True, True]
    for near, far, _ in (between_ranks, of_a_logger, to_store):
        near.close()
        far.close()
