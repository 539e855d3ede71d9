"""Listens for clients, and does what is due at times. `Gateway` is the program without table and options."""

import asyncio
import contextlib
import resource
import socket
from collections.abc import AsyncIterator

import msgspec

from fenka.core.units import MIB
from fenka.gateway.client_registry import ClientRegistry, ClientTimeouts
from fenka.gateway.dispatcher import TICK_S, BufferLimits, Dispatcher, ReplicaTimeouts
from fenka.gateway.http1_client import Http1ClientConnection

BACKLOG = 1024
"""Connections that the kernel accepts while the program is busy."""
ACCEPTED_AT_ONCE = 32
"""Connections that asyncio accepts before the first of them can be refused."""
MAX_DESCRIPTORS = 1 << 20
"""The kernel's default limit, where the process has none."""
SPARE_DESCRIPTORS = 32 + ACCEPTED_AT_ONCE


class GatewayLimits(msgspec.Struct, frozen=True):
    """All limits of a gateway.

    Attributes:
        max_connections: Clients' connections; None for half of the descriptors that the process may have.
        client_bytes: Memory of all clients' connections: of heads and bodies that no replica was sent yet,
            and of responses that no client has read.
    """

    buffer: BufferLimits = BufferLimits()
    replicas: ReplicaTimeouts = ReplicaTimeouts()
    clients: ClientTimeouts = ClientTimeouts()
    max_connections: int | None = None
    client_bytes: int = 192 * MIB


class Gateway:
    """A gateway: its dispatcher and its clients."""

    def __init__(self, limits: GatewayLimits) -> None:
        self.dispatcher = Dispatcher(limits.buffer, limits.replicas)
        self.clients = ClientRegistry(
            self.dispatcher,
            limits.clients,
            limits.max_connections or _affordable_connections(),
            limits.client_bytes,
        )
        self._servers: list[asyncio.Server] = []

    @property
    def problem(self) -> str:
        """Return why it is not ready, empty if it is: from its first table until it drains."""
        if self.clients.draining:
            return "the gateway ends"
        return "" if self.dispatcher.has_table else "the replicas are not known yet"

    @contextlib.asynccontextmanager
    async def serve(self, listening: dict[str, socket.socket]) -> AsyncIterator[None]:
        """Accept connections while the block runs. Then end all connections.

        Args:
            listening: The sockets by the name of the replicas' port that they stand for.
        """
        loop = asyncio.get_running_loop()
        async with contextlib.AsyncExitStack() as stack:
            for port, listener in listening.items():
                server = await loop.create_server(
                    lambda port=port: Http1ClientConnection(self.clients, port),  # type: ignore[misc]
                    sock=listener,
                    backlog=ACCEPTED_AT_ONCE,
                )
                listener.listen(BACKLOG)
                self._servers.append(server)
            stack.callback(self._stop_accepting)
            ticking = asyncio.create_task(self._tick())
            stack.callback(ticking.cancel)
            stack.callback(self._close)
            yield

    async def drain(self) -> None:
        """Accept no more connections, end each with its current response, and return after the last."""
        self._stop_accepting()
        self.clients.drain()
        while self.clients.connections:
            await asyncio.sleep(TICK_S)

    def _stop_accepting(self) -> None:
        for server in self._servers:
            server.close()

    def _close(self) -> None:
        for connection in list(self.clients.connections):
            connection.abort()
        self.dispatcher.close()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self.dispatcher.tick()
            self.clients.sweep()


def listening_socket(address: str, port: int) -> socket.socket:
    """Return a listening socket. Several gateways may listen on one port; the kernel spreads connections."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, port), family=family, backlog=BACKLOG, reuse_port=True)


def raise_descriptor_limit() -> None:
    """Let this process have as many open descriptors as its hard limit allows."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _affordable_connections() -> int:
    """Return how many clients' connections the process can have beside as many to replicas."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        limit = MAX_DESCRIPTORS
    return max(1, (limit - SPARE_DESCRIPTORS) // 2)
