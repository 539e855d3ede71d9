"""Connections to replicas that are idle: the next requests use them again."""

from fenka.gateway.http1_replica import Http1ReplicaConnection, Owner
from fenka.gateway.routing import Replica


class Http1Pool:
    """Idle connections of HTTP/1.1.

    Args:
        owner: decides what follows each exchange.
        idle_s: seconds for which an idle connection is used again.
    """

    def __init__(self, owner: Owner, idle_s: float) -> None:
        self._owner, self._idle_s = owner, idle_s
        self._idle: dict[tuple[Replica, str], list[Http1ReplicaConnection]] = {}

    def take(self, replica: Replica, port: str, now: float) -> Http1ReplicaConnection | None:
        """Return a connection that a request can be sent on, None if there is none."""
        idle = self._idle.get((replica, port))
        while idle:
            # The last one is the most likely to be still open, and others may end.
            connection = idle.pop()
            if connection.is_open() and now - connection.idle_since < self._idle_s:
                return connection
            connection.close()
        return None

    def make(self, replica: Replica, port: str) -> Http1ReplicaConnection:
        """Return the protocol of a new connection."""
        return Http1ReplicaConnection(self._owner, replica, port)

    def put(self, connection: Http1ReplicaConnection, now: float) -> None:
        """Keep a connection whose exchange is complete, or close it."""
        if not connection.is_open():
            return
        if connection.replica.terminating:
            connection.close()
            return
        connection.idle_since = now
        self._idle.setdefault((connection.replica, connection.port), []).append(connection)

    def discard(self, connection: Http1ReplicaConnection) -> None:
        """Forget a connection that has ended."""
        idle = self._idle.get((connection.replica, connection.port))
        if idle and connection in idle:
            idle.remove(connection)

    def close_idle(self, replica: Replica) -> None:
        """Close the idle connections to a replica that is to end."""
        for key in [key for key in self._idle if key[0] is replica]:
            for connection in self._idle.pop(key):
                connection.close()

    def tick(self, now: float) -> None:
        """Close connections that have been idle for too long."""
        for key, idle in list(self._idle.items()):
            while idle and now - idle[0].idle_since > self._idle_s:
                idle.pop(0).close()
            if not idle:
                del self._idle[key]

    def close(self) -> None:
        """Close all."""
        for idle in self._idle.values():
            for connection in list(idle):
                connection.close()
        self._idle.clear()
