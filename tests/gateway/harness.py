"""A gateway with Envoy, replicas that answer as each test says, and clients that send any bytes.

The gateway's own program runs in the test's event loop. Envoy is a process, which ends with the block.
"""

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

from fenka.gateway import client_sockets
from fenka.gateway.main import GatewayOptions, assemble
from fenka.gateway.metrics import GatewayMetrics
from fenka.gateway.service_gateway import ServiceGateway
from fenka.jobs.routing_table import ReplicaEntry, VersionEntry
from tests.gateway.tables import LOOPBACK, table, version
from tests.waiting import eventually, until

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
Answer = tuple[int, bytes]

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
GET = b"GET / HTTP/1.1\r\nHost: service\r\n\r\n"
ANSWER = (200, b"ok")
"""What a client sees of OK."""
LIMIT = 1 << 20
"""Of what replicas read at once, in bytes: more than any head that a gateway passes on."""
POST = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\n\r\nabc"


class FakeReplica:
    """A server that answers each request with the same bytes, or serves each connection by a function.

    Attributes:
        heads: The heads of all requests.
        bodies: Their bodies, without framing.
        connections: The number of connections with requests so far.
        ended: The number of connections that have ended.
    """

    def __init__(self, response: bytes = OK, handler: Handler | None = None) -> None:
        self.response, self._handler = response, handler or self._answer
        self._serving = set[asyncio.Task[None]]()
        self.heads: list[bytes] = []
        self.bodies: list[bytes] = []
        self.connections = self.ended = 0
        self.host, self.port = LOOPBACK, 0
        self.path = ""

    @contextlib.asynccontextmanager
    async def serve(
        self, port: int = 0, path: str = "", host: str = LOOPBACK
    ) -> AsyncIterator["FakeReplica"]:
        """Serve while the block runs, at a Unix socket if a path is given."""
        if path:
            server = await asyncio.start_unix_server(self._on_connection, path, limit=LIMIT)
            self.path = path
        else:
            server = await asyncio.start_server(self._on_connection, host, port, limit=LIMIT)
            self.host, self.port = host, server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()
            for task in self._serving:
                task.cancel()
            await asyncio.gather(*self._serving, return_exceptions=True)

    def entry(self, *, terminating: bool = False, port: str = "http") -> ReplicaEntry:
        """Return its row of a routing table."""
        return ReplicaEntry(self.host, {port: self.path or self.port}, terminating)

    async def read(self, reader: asyncio.StreamReader) -> bytes:
        """Read and record a request, and return its head."""
        head = await reader.readuntil(b"\r\n\r\n")
        self.heads.append(head)
        body = b""
        lowered = head.lower()
        if b"\r\ntransfer-encoding: chunked\r\n" in lowered:
            while size := int(await reader.readuntil(b"\r\n"), 16):
                body += (await reader.readexactly(size + 2))[:-2]
            while await reader.readuntil(b"\r\n") != b"\r\n":
                pass
        elif b"\r\ncontent-length: " in lowered:
            length = lowered.partition(b"\r\ncontent-length: ")[2].partition(b"\r\n")[0]
            body = await reader.readexactly(int(length))
        self.bodies.append(body)
        return head

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await self.read(reader)
            writer.write(self.response)

    def _on_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serving = asyncio.create_task(self._serve(reader, writer))
        self._serving.add(serving)
        serving.add_done_callback(self._serving.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # Envoy's checks send nothing, and do not count.
        data = await reader.read(1 << 30)
        if not data:
            writer.close()
            return
        reader.feed_data(data)
        self.connections += 1
        try:
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
                await self._handler(reader, writer)
        finally:
            self.ended += 1
            writer.close()


class HeldReplica(FakeReplica):
    """A replica that answers when it may."""

    def __init__(self, response: bytes = OK) -> None:
        super().__init__(response, self._hold)
        self.may_answer = asyncio.Event()

    async def _hold(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await self.read(reader)
            await self.may_answer.wait()
            writer.write(self.response)


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

    async def answer(self) -> Answer:
        """Receive a response whose length is declared. Return its status and its body."""
        head, _, body = (await self.response()).partition(b"\r\n\r\n")
        return int(head.split(b" ")[1]), body

    async def fetch(self, data: bytes = GET) -> Answer:
        """Send a request. Return the status and the body of its response."""
        await self.send(data)
        return await self.answer()

    async def rest(self) -> bytes:
        """Receive everything up to the end of the connection."""
        parts = list[bytes]()
        with contextlib.suppress(ConnectionError):
            while part := await self.reader.read(1 << 16):
                parts.append(part)
        return b"".join(parts)

    async def request(self, data: bytes = GET) -> bytes:
        """Send a request and receive its response."""
        await self.send(data)
        return await self.response()

    def close(self) -> None:
        """Hang up."""
        self.writer.close()


class Installation:
    """A gateway.

    Attributes:
        gateway: Its own program.
        ports: Where clients connect, by the name of the replicas' port.
        work: What runs the gateway.
    """

    def __init__(self, gateway: ServiceGateway, ports: dict[str, int]) -> None:
        self.gateway, self.ports = gateway, ports
        self.metrics = GatewayMetrics(gateway, lambda: True)
        self.work = asyncio.create_task(gateway.run())

    @property
    def port(self) -> int:
        """Return the port for HTTP."""
        return self.ports["http"]

    async def update(self, *versions: VersionEntry) -> None:
        """Replace the table, and return once Envoy uses it."""
        self.gateway.update(table(*versions))
        await until(lambda: self.gateway.used_table is self.gateway.table)

    async def start(self, *replicas: FakeReplica) -> None:
        """Make these all replicas of the service."""
        await self.update(version("v1", *(replica.entry() for replica in replicas)))

    async def waiting(self, count: int) -> None:
        """Return when this many requests wait for a replica."""
        await until(lambda: len(self.gateway.held) == count)

    async def metric(self, name: str, **labels: str) -> float:
        """Return a metric's value now, 0 if it is absent."""
        await self.metrics.refresh()
        for family in self.metrics.collect():
            for sample in family.samples:
                if sample.name == f"fenka_gateway_{name}" and sample.labels == labels:
                    return sample.value
        return 0.0

    async def until_metric(self, name: str, value: float, **labels: str) -> None:
        """Return when a metric has this value."""

        async def has_value() -> bool:
            return await self.metric(name, **labels) == value

        await eventually(has_value)

    async def envoy_memory_kib(self) -> int:
        """Return the resident memory of Envoy."""
        status = Path(f"/proc/{self.gateway.envoy.pid}/status").read_text()
        found = re.search(r"VmRSS:\s+(\d+)", status)
        assert found
        return int(found[1])

    @contextlib.asynccontextmanager
    async def client(self, port: str = "http") -> AsyncIterator[Client]:
        """Connect a client for the block."""
        client = Client(*await asyncio.open_connection(LOOPBACK, self.ports[port]))
        try:
            yield client
        finally:
            client.close()

    async def send(self, data: bytes) -> bytes:
        """Send bytes on a new connection, and return all that comes until it ends."""
        async with self.client() as client:
            with contextlib.suppress(ConnectionError):
                await client.send(data)
            return await client.rest()


@contextlib.asynccontextmanager
async def installation(
    *replicas: FakeReplica,
    wait: float = 100.0,
    buffer: int = 1000,
    response_timeout: float = 100.0,
    ports: tuple[str, ...] = ("http",),
    traces: str = "",
    hosts: tuple[str, ...] = (),
) -> AsyncIterator[Installation]:
    """Serve these replicas, all of one version, by a gateway.

    Args:
        replicas: What to serve.
        wait: Seconds that a request waits for a replica.
        buffer: How many may wait.
        response_timeout: Seconds for the head of a response.
        ports: The names of the replicas' ports.
        traces: URL of a collector of spans.
        hosts: The host names that clients may use; empty: any.
    """
    listeners = {name: client_sockets.listen(LOOPBACK, 0) for name in ports}
    numbers = {name: listener.getsockname()[1] for name, listener in listeners.items()}
    options = GatewayOptions(
        # The gateway owns and closes them.
        listen=[f"{name}=fd:{listener.detach()}" for name, listener in listeners.items()],
        wait=wait,
        buffer=buffer,
        response_timeout=response_timeout,
        traces=traces,
        host=[*hosts],
    )
    async with contextlib.AsyncExitStack() as stack:
        for replica in replicas:
            await stack.enter_async_context(replica.serve())
        gateway = await assemble(options, stack)
        served = Installation(gateway, numbers)
        stack.push_async_callback(_end, served.work)
        await until(lambda: gateway.envoy.running or served.work.done())
        await served.start(*replicas)
        yield served


async def _end(work: asyncio.Task[None]) -> None:
    work.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await work
