"""What all clients' connections have in common: number, time limits, and the end of the program."""

from typing import Protocol

import msgspec

from fenka.gateway.dispatcher import Dispatcher


class ClientTimeouts(msgspec.Struct, frozen=True):
    """How long clients are waited for.

    Attributes:
        head_s: Seconds from the first byte of a request to the end of its head.
        body_s: Seconds without a byte of a body that is not complete.
        idle_s: Seconds between requests: more than common load balancers keep a connection (60 s).
        unread_s: Seconds in which a client does not read its response.
        linger_s: Seconds in which a client can read a response to an incomplete request.
    """

    head_s: float = 10.0
    body_s: float = 30.0
    idle_s: float = 75.0
    unread_s: float = 60.0
    linger_s: float = 2.0


class Connection(Protocol):
    """A client's connection, as the registry uses it."""

    @property
    def idle(self) -> bool:
        """Return whether no request is unanswered."""

    def check(self, now: float) -> None:
        """End the connection if its client has been waited for too long."""

    def drain(self) -> None:
        """End the connection after what is unanswered."""

    def abort(self) -> None:
        """Reset the connection."""


class ClientRegistry:
    """All clients' connections.

    Attributes:
        connections: Those that are open, the oldest first.
        draining: The program is to end: each connection of HTTP/1.1 ends with its current response.
    """

    def __init__(
        self, dispatcher: Dispatcher, timeouts: ClientTimeouts, max_connections: int
    ) -> None:
        self.dispatcher, self.timeouts = dispatcher, timeouts
        self.connections: dict[Connection, None] = {}
        self.draining = False
        self._max_connections = max_connections

    def on_open(self, connection: Connection) -> None:
        """Count a connection. If there are too many, the oldest idle connection ends."""
        self.connections[connection] = None
        if len(self.connections) > self._max_connections:
            self.dispatcher.statistics.reject("too_many_connections")
            idle = (each for each in self.connections if each.idle)
            next(idle, connection).abort()

    def on_close(self, connection: Connection) -> None:
        """Drop a connection that has ended."""
        self.connections.pop(connection, None)

    def sweep(self) -> None:
        """End connections whose clients have been waited for too long."""
        now = self.dispatcher.clock()
        for connection in list(self.connections):
            connection.check(now)

    def drain(self) -> None:
        """End all connections after what is unanswered."""
        self.draining = True
        for connection in list(self.connections):
            connection.drain()
