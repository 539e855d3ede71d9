"""Limits of all clients' connections: number, memory, time, and the end of the program.

When there are too many connections or bytes, the client with the most gives up some, so others are served. A
client is an address, or a user of this machine.
"""

import asyncio
import contextlib
import ipaddress
from collections import Counter
from typing import Protocol

import msgspec

from fenka.gateway.dispatcher import Dispatcher
from fenka.hardware.peer_credentials import client_uid


class ClientTimeouts(msgspec.Struct, frozen=True):
    """How long clients are waited for.

    Attributes:
        head_s: Seconds from the first byte of a request to the end of its head.
        body_s: Seconds without a byte of a body that is not complete.
        body_bytes_per_s: The smallest mean rate of a body of HTTP/1.1 (Kestrel's default).
        rate_grace_s: Seconds after which a body's rate counts.
        idle_s: Seconds between requests: more than common load balancers keep a connection (60 s).
        unread_s: Seconds in which a client does not read its response.
        linger_s: Seconds in which a client can read a response to an incomplete request.
    """

    head_s: float = 10.0
    body_s: float = 30.0
    body_bytes_per_s: float = 240.0
    rate_grace_s: float = 10.0
    idle_s: float = 75.0
    unread_s: float = 60.0
    linger_s: float = 2.0


BASE_BYTES = 16 * 1024
"""Memory of a connection without data: its socket, transport, parser and protocol."""


class Connection(Protocol):
    """A client's connection, as the registry uses it."""

    client: str
    """Whose connection it is."""

    @property
    def held_bytes(self) -> int:
        """Return the bytes in memory of what the client has sent, and has not read."""

    @property
    def idle(self) -> bool:
        """Return whether no request is unanswered."""

    def check(self, now: float) -> None:
        """End the connection if its client has been waited for too long."""

    def drain(self) -> None:
        """End the connection after what is unanswered."""

    def abort(self) -> None:
        """Reset the connection."""


def client_of(transport: asyncio.Transport) -> tuple[str, str]:
    """Return a client's address, and what its connections are counted by: on this machine its user."""
    peer, own = transport.get_extra_info("peername"), transport.get_extra_info("sockname")
    if not peer:
        return "unknown", "unknown"
    address = str(peer[0])
    if ipaddress.ip_address(address).is_loopback and ":" not in address:
        with contextlib.suppress(OSError):
            return address, f"user {client_uid(peer, own)}"
    return address, address


class ClientRegistry:
    """All clients' connections.

    Attributes:
        connections: Those that are open, the oldest first, with their memory in bytes.
        held_bytes: The memory of all.
        draining: The program is to end: each connection of HTTP/1.1 ends with its current response.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        timeouts: ClientTimeouts,
        max_connections: int,
        max_bytes: int,
    ) -> None:
        self.dispatcher, self.timeouts = dispatcher, timeouts
        self.connections: dict[Connection, int] = {}
        self.held_bytes = 0
        self.draining = False
        self._clients: dict[str, dict[Connection, None]] = {}
        """The connections of each client, the oldest first."""
        self._client_bytes: Counter[str] = Counter()
        self._max_connections, self._max_bytes = max_connections, max_bytes

    def on_open(self, connection: Connection) -> None:
        """Count a connection. If there are too many, the client with the most loses its oldest idle one."""
        self.connections[connection] = 0
        self._clients.setdefault(connection.client, {})[connection] = None
        if len(self.connections) > self._max_connections:
            theirs = max(self._clients.values(), key=len)
            idle = (their for their in theirs if their.idle)
            self._end(next(idle, next(reversed(theirs))), "too_many_connections")
        self.account(connection)

    def on_close(self, connection: Connection) -> None:
        """Drop a connection that has ended."""
        if connection in self.connections:
            self._count(connection, 0)
            del self.connections[connection], self._clients[connection.client][connection]
            if not self._clients[connection.client]:
                del self._clients[connection.client], self._client_bytes[connection.client]

    def account(self, connection: Connection) -> None:
        """Count a connection's memory. If all is too much, the client with the most loses its oldest ones."""
        if connection not in self.connections:
            return
        self._count(connection, BASE_BYTES + connection.held_bytes)
        while self.held_bytes > self._max_bytes:
            theirs = self._clients[max(self._client_bytes, key=self._client_bytes.__getitem__)]
            holding = (their for their in theirs if self.connections[their] > BASE_BYTES)
            self._end(next(holding, next(iter(theirs))), "memory")

    def _count(self, connection: Connection, size: int) -> None:
        grown = size - self.connections[connection]
        if grown:
            self.connections[connection] = size
            self.held_bytes += grown
            self._client_bytes[connection.client] += grown

    def _end(self, connection: Connection, reason: str) -> None:
        self.dispatcher.statistics.reject(reason)
        self.on_close(connection)
        connection.abort()

    def sweep(self) -> None:
        """End connections whose clients have been waited for too long."""
        now = self.dispatcher.clock()
        for connection in list(self.connections):
            connection.check(now)
            self.account(connection)

    def drain(self) -> None:
        """End all connections after what is unanswered."""
        self.draining = True
        for connection in list(self.connections):
            connection.drain()
