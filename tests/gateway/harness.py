"""A gateway on loopback, with replicas that answer as each test says, and clients that send any bytes."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

from fenka.gateway.client_registry import ClientTimeouts
from fenka.gateway.dispatcher import ReplicaTimeouts
from fenka.gateway.http1_client import Http1ClientConnection
from fenka.gateway.server import Gateway, GatewayLimits, listening_socket
from fenka.jobs.routing_table import ReplicaEntry, RoutingTable, VersionEntry

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
GET = b"GET / HTTP/1.1\r\nHost: service\r\n\r\n"
LOOPBACK = "127.0.0.1"
DEFAULT_LIMITS = GatewayLimits(
    replicas=ReplicaTimeouts(idle_s=100), clients=ClientTimeouts(head_s=100, body_s=100)
)
"""Limits that a test does not reach on a busy machine."""


class FakeReplica:
    """A server that answers each request with the same bytes, or serves each connection by a function.

    Attributes:
        heads: The heads of all requests.
        bodies: Their bodies, without framing.
        connections: The number of connections so far.
        ended: The number of connections that have ended.
    """

    def __init__(self, response: bytes = OK, handler: Handler | None = None) -> None:
        self.response, self._handler = response, handler or self._answer
        self.heads: list[bytes] = []
        self.bodies: list[bytes] = []
        self.connections = self.ended = 0
        self.port = 0
        self.path = ""

    @contextlib.asynccontextmanager
    async def serve(self, port: int = 0, path: str = "") -> AsyncIterator["FakeReplica"]:
        """Serve while the block runs, at a Unix socket if a path is given."""
        if path:
            server = await asyncio.start_unix_server(self._on_connection, path)
            self.path = path
        else:
            server = await asyncio.start_server(self._on_connection, LOOPBACK, port)
            self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()

    def entry(self, *, terminating: bool = False) -> ReplicaEntry:
        """Return its row of a routing table."""
        return ReplicaEntry(LOOPBACK, {"http": self.path or self.port}, terminating)

    async def read(self, reader: asyncio.StreamReader) -> bytes:
        """Read and record a request, and return its head."""
        head = await reader.readuntil(b"\r\n\r\n")
        self.heads.append(head)
        body = b""
        lowered = head.lower()
        if b"\r\ntransfer-encoding: chunked\r\n" in lowered:
            while size := int(await reader.readuntil(b"\r\n"), 16):
                body += (await reader.readexactly(size + 2))[:-2]
            await reader.readuntil(b"\r\n")
        elif b"\r\ncontent-length: " in lowered:
            length = lowered.partition(b"\r\ncontent-length: ")[2].partition(b"\r\n")[0]
            body = await reader.readexactly(int(length))
        self.bodies.append(body)
        return head

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await self.read(reader)
            writer.write(self.response)

    async def _on_connection(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.connections += 1
        try:
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
                await self._handler(reader, writer)
        finally:
            self.ended += 1
            writer.close()


def version(name: str, *replicas: ReplicaEntry, weight: int = 1) -> VersionEntry:
    """Return a version."""
    return VersionEntry(name, weight, list(replicas))


def table(*versions: VersionEntry) -> RoutingTable:
    """Return a routing table."""
    return RoutingTable("fenka.gateway/1", "bert", list(versions))


class Client:
    """A connection to the gateway."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def send(self, data: bytes) -> None:
        """Send bytes."""
        self.writer.write(data)
        await self.writer.drain()

    async def head(self) -> bytes:
        """Receive the head of a response."""
        return await self.reader.readuntil(b"\r\n\r\n")

    async def response(self) -> bytes:
        """Receive a response whose length is declared."""
        head = await self.head()
        length = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
        return head + await self.reader.readexactly(int(length or b"0"))

    async def rest(self) -> bytes:
        """Receive everything up to the end of the connection."""
        return await self.reader.read()

    async def request(self, data: bytes = GET) -> bytes:
        """Send a request and receive its response."""
        await self.send(data)
        return await self.response()

    def close(self) -> None:
        """Hang up."""
        self.writer.close()


class Installation:
    """A gateway and its address."""

    def __init__(self, gateway: Gateway, port: int) -> None:
        self.gateway, self.port = gateway, port
        self.dispatcher = gateway.dispatcher

    @contextlib.asynccontextmanager
    async def client(self) -> AsyncIterator[Client]:
        """Connect a client for the block."""
        client = Client(*await asyncio.open_connection(LOOPBACK, self.port))
        try:
            yield client
        finally:
            client.close()

    async def send(self, data: bytes) -> bytes:
        """Send bytes on a new connection, and return all that comes until it ends."""
        async with self.client() as client:
            await client.send(data)
            return await client.rest()

    @property
    def connection(self) -> Http1ClientConnection:
        """The gateway's side of the only client's connection."""
        (connection,) = self.gateway.clients.connections
        assert isinstance(connection, Http1ClientConnection)
        return connection

    @property
    def in_flight(self) -> int:
        """The number of requests at replicas."""
        return self.dispatcher.router.in_flight


@contextlib.asynccontextmanager
async def installation(
    *replicas: FakeReplica, limits: GatewayLimits = DEFAULT_LIMITS
) -> AsyncIterator[Installation]:
    """Serve these replicas, all of one version, by a gateway."""
    gateway = Gateway(limits)
    async with contextlib.AsyncExitStack() as stack:
        for replica in replicas:
            await stack.enter_async_context(replica.serve())
        gateway.dispatcher.update(table(version("v1", *(replica.entry() for replica in replicas))))
        listening = listening_socket(LOOPBACK, 0)
        port = listening.getsockname()[1]
        await stack.enter_async_context(gateway.serve({"http": listening}))
        yield Installation(gateway, port)
