"""Notice within a second that the process of another rank has died, however it died.

Every rank holds a connection to rank 0 on which nothing is sent until it ends the run. If a process dies, its operating
system closes the connection. Unlike a heartbeat, this gives no false alarm while a process is stopped or busy.
"""

import json
import os
import secrets
import socket
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any, Protocol

_WELCOME, _GOODBYE = b"welcome", b"goodbye"
_HELLO_BYTES = 64

OnDeath = Callable[[int], None]
"""A function that is called, in the watcher's thread, with the rank whose process died."""


_connections: "weakref.WeakSet[socket.socket]" = weakref.WeakSet()
"""The sockets of this process. A forked process closes its copies, which would keep the connections open."""


@cache
def _close_in_forked_processes() -> None:
    if hasattr(os, "register_at_fork"):  # not on Windows, which does not fork
        os.register_at_fork(after_in_child=_close_all)


def _close_all() -> None:
    for connection in list(_connections):
        connection.close()


def _keep(connection: socket.socket) -> socket.socket:
    _close_in_forked_processes()
    _connections.add(connection)
    return connection


class Liveness(Protocol):
    """Notices that the process of another rank has died."""

    port: int
    """The port of rank 0 at which ranks connect; 0 if there are no connections."""
    on_death: OnDeath

    @property
    def has_others(self) -> bool:
        """Whether a connected rank has neither said goodbye nor died, as far as `poll` has found."""

    def poll(self) -> None:
        """Check the connections without waiting; call `on_death` for a rank that has died."""

    def say_goodbye(self) -> None:
        """Tell the other ranks that this one ends well, whenever its process ends. Call this once."""

    def end(self) -> None:
        """Say goodbye, unless this rank has done so, and close the connections."""


class LivenessOfRankZero:
    """Used by all ranks except rank 0: notices that rank 0 has died.

    Args:
        rank: this process's rank.
        address: the `address` of rank 0's `LivenessOfOthers`.
    """

    def __init__(self, rank: int, address: str) -> None:
        self.on_death: OnDeath = lambda rank: None
        self._rank = rank
        self._address = json.loads(address)
        self.port: int = self._address["port"]
        self._connection: socket.socket | None = None
        self._is_accepted = False
        self._is_done = False
        self._has_said_goodbye = False

    @property
    def has_others(self) -> bool:
        """Whether rank 0 has accepted the connection, and has neither said goodbye nor died, as far as `poll` found."""
        return self._is_accepted and not self._is_done and self._connection is not None

    def poll(self) -> None:
        """Check the connection. The first call connects, which may take some seconds if a firewall prevents it."""
        if self._is_done:
            return
        if self._connection is None:
            if not self._has_said_goodbye:
                self._connect()
            return
        received = _receive(self._connection)
        if received == _WELCOME:
            self._is_accepted = True
            received = _receive(self._connection)
        if received == _GOODBYE:
            self._is_done = True  # the connection is left open, on which this rank will say goodbye
        elif received is not None:
            self._close()
            if self._is_accepted:  # else rank 0 had ended the run before
                self.on_death(0)

    def say_goodbye(self) -> None:
        """Tell rank 0 that this rank ends well."""
        if not self._has_said_goodbye:
            self._has_said_goodbye = True
            if self._connection is not None:
                with suppress(OSError):
                    self._connection.sendall(_GOODBYE)

    def end(self) -> None:
        """Say goodbye, and close the connection."""
        self.say_goodbye()
        self._close()

    def _connect(self) -> None:
        for node in self._address["nodes"]:
            with suppress(OSError):
                connection = socket.create_connection((node, self.port), timeout=1.0)
                connection.sendall(f"{self._address['token']} {self._rank}".ljust(_HELLO_BYTES).encode())
                connection.setblocking(False)
                _keep_alive(connection)
                self._connection = _keep(connection)
                if self._has_said_goodbye:  # in another thread, while this one connected
                    connection.sendall(_GOODBYE)
                return
        self._is_done = True  # only collectives will notice that a process has died

    def _close(self) -> None:
        self._is_done = True
        if self._connection is not None:
            self._connection.close()
            self._connection = None


class LivenessOfOthers:
    """Used by rank 0: accepts a connection from every other rank, and notices which of them has died.

    Args:
        main_address: the address at which other ranks reach rank 0's node.
    """

    def __init__(self, main_address: str) -> None:
        self.on_death: OnDeath = lambda rank: None
        self._token = secrets.token_hex(16)
        is_dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if is_dual else socket.AF_INET
        self._listener = _keep(socket.create_server(("", 0), family=family, backlog=4096, dualstack_ipv6=is_dual))
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        nodes = list(dict.fromkeys([_own_address(main_address), socket.gethostname(), main_address]))
        self.address = json.dumps({"nodes": nodes, "port": self.port, "token": self._token})
        """What the other ranks need to connect, as text."""
        self._unknown: list[socket.socket] = []
        self._ranks: dict[int, socket.socket] = {}
        self._left: list[socket.socket] = []
        """The connections of ranks that have said goodbye. They are not closed, which would look like a death."""
        self._has_said_goodbye = False

    @property
    def has_others(self) -> bool:
        """Whether a connected rank has neither said goodbye nor died, as far as `poll` has found."""
        return bool(self._ranks)

    def poll(self) -> None:
        """Accept connections, and check those of the ranks."""
        with suppress(OSError):  # no more connections are pending
            while True:
                connection, _ = self._listener.accept()
                connection.setblocking(False)
                _keep_alive(connection)
                self._unknown.append(_keep(connection))
        for connection in list(self._unknown):
            self._greet(connection)
        for rank, connection in list(self._ranks.items()):
            received = _receive(connection)
            if received is not None:
                del self._ranks[rank]
                if received == _GOODBYE:
                    self._left.append(connection)
                else:
                    connection.close()
                    self.on_death(rank)

    def say_goodbye(self) -> None:
        """Tell the other ranks that rank 0 ends well."""
        if not self._has_said_goodbye:
            self._has_said_goodbye = True
            for connection in self._all:
                with suppress(OSError):
                    connection.sendall(_GOODBYE)

    def end(self) -> None:
        """Say goodbye, and close the connections."""
        self.say_goodbye()
        self._listener.close()
        for connection in self._all:
            connection.close()
        self._ranks, self._unknown, self._left = {}, [], []

    @property
    def _all(self) -> list[socket.socket]:
        return [*self._ranks.values(), *self._unknown, *self._left]

    def _greet(self, connection: socket.socket) -> None:
        try:
            hello = connection.recv(_HELLO_BYTES)
        except BlockingIOError:
            return
        except OSError:
            hello = b""
        self._unknown.remove(connection)
        token, _, rank = hello.decode(errors="replace").partition(" ")
        if secrets.compare_digest(token.encode(), self._token.encode()) and rank.strip().isdecimal():
            self._ranks[int(rank)] = connection
            with suppress(OSError):
                connection.sendall(_WELCOME + (_GOODBYE if self._has_said_goodbye else b""))
        else:
            connection.close()


def _receive(connection: socket.socket) -> bytes | None:
    """Return the bytes that have arrived, `b""` if the other process closed its end, `None` if neither is the case.

    If the network has lost the connection, which says nothing about the process, return a goodbye.
    """
    try:
        return connection.recv(len(_GOODBYE))
    except BlockingIOError:
        return None
    except ConnectionError:
        return b""
    except OSError:
        return _GOODBYE


def _keep_alive(connection: socket.socket) -> None:
    """Send a packet once per minute, because firewalls forget idle connections."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_KEEPIDLE"):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60)


def _own_address(main_address: Any) -> str:
    """Return the address of this node in the network of `main_address`."""
    with suppress(OSError):
        family, kind, _, _, target = socket.getaddrinfo(main_address, 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)  # sends nothing
            return str(probe.getsockname()[0])
    return "127.0.0.1"
