"""Peers of HTTP/2: a gRPC service with its clients, and either side of a connection frame by frame."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import grpc
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import DataReceived, Event, ResponseReceived

from fenka.jobs.routing_table import ReplicaEntry
from tests.gateway.harness import Client, Installation, installation
from tests.gateway.tables import LOOPBACK, version

Context = grpc.aio.ServicerContext[bytes, bytes]
METHOD = "/model.Model/{}"


class Model:
    """A gRPC service. Messages are bytes.

    Attributes:
        calls: The number of calls that have begun.
        cancelled: The number of calls whose clients went.
        go_on: Lets `hold` answer.
    """

    def __init__(self, name: bytes = b"model") -> None:
        self._name = name
        self.calls = self.cancelled = 0
        self.go_on = asyncio.Event()
        self.peer_metadata: dict[str, str] = {}

    async def infer(self, request: bytes, context: Context) -> bytes:
        """Return the request, behind the model's name."""
        self.calls += 1
        self.peer_metadata = {
            str(key): str(value) for key, value in context.invocation_metadata() or ()
        }
        context.set_trailing_metadata((("x-cost", "1"),))
        return self._name + request

    async def fail(self, _: bytes, context: Context) -> bytes:
        """Fail with a status and a message."""
        await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "no model is loaded")
        return b""

    async def hold(self, _: bytes, __: Context) -> bytes:
        """Answer when the test says so."""
        self.calls += 1
        try:
            await self.go_on.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return self._name

    async def chat(self, requests: AsyncIterator[bytes], _: Context) -> AsyncIterator[bytes]:
        """Answer each message before the next one comes."""
        async for request in requests:
            yield request.upper()

    @contextlib.asynccontextmanager
    async def serve(self, path: str = "") -> AsyncIterator[ReplicaEntry]:
        """Serve while the block runs, and return the replica's row."""
        options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
        server = grpc.aio.server(options=options)
        handlers: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {
            "Infer": grpc.unary_unary_rpc_method_handler(self.infer),
            "Fail": grpc.unary_unary_rpc_method_handler(self.fail),
            "Hold": grpc.unary_unary_rpc_method_handler(self.hold),
            "Chat": grpc.stream_stream_rpc_method_handler(self.chat),
        }
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("model.Model", handlers),)
        )
        port = server.add_insecure_port(f"unix:{path}" if path else f"{LOOPBACK}:0")
        await server.start()
        try:
            yield ReplicaEntry(LOOPBACK, {"http": path or port})
        finally:
            self.go_on.set()
            await server.stop(None)


@contextlib.asynccontextmanager
async def channel_to(served: Installation) -> AsyncIterator[grpc.aio.Channel]:
    """Connect a gRPC client of its own connection."""
    options = [
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.max_receive_message_length", -1),
        ("grpc.max_send_message_length", -1),
    ]
    async with grpc.aio.insecure_channel(f"{LOOPBACK}:{served.port}", options=options) as channel:
        yield channel


def unary(channel: grpc.aio.Channel, name: str) -> grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]:
    """Return a method of the model."""
    method: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(
        METHOD.format(name)
    )
    return method


@contextlib.asynccontextmanager
async def grpc_installation(
    model: Model, wait: float = 100.0
) -> AsyncIterator[tuple[Installation, grpc.aio.Channel]]:
    """Serve a model by a gateway, with a client."""
    async with (
        model.serve() as entry,
        installation(wait=wait) as served,
        channel_to(served) as channel,
    ):
        await served.update(version("v1", entry))
        yield served, channel


class Peer:
    """One side of a connection of HTTP/2."""

    def __init__(self, client: Client, *, client_side: bool) -> None:
        self.client = client
        config = H2Configuration(
            client_side=client_side, header_encoding=None, validate_outbound_headers=False
        )
        self.h2 = H2Connection(config)
        self.h2.initiate_connection()
        self.events: list[Event] = []

    async def flush(self) -> None:
        """Send what h2 has written."""
        await self.client.send(self.h2.data_to_send())

    async def receive(self, wanted: type[Event]) -> Event:
        """Return the next event of a kind."""
        while True:
            for event in self.events:
                if isinstance(event, wanted):
                    self.events.remove(event)
                    return event
            data = await self.client.reader.read(65536)
            assert data, "the connection has ended"
            events = self.h2.receive_data(data)
            for event in events:
                if isinstance(event, DataReceived) and event.flow_controlled_length:
                    self.h2.acknowledge_received_data(
                        event.flow_controlled_length, event.stream_id or 0
                    )
            self.events += events
            await self.flush()

    async def status(self) -> bytes:
        """Receive the head of a response, and return its status."""
        response = await self.receive(ResponseReceived)
        assert isinstance(response, ResponseReceived)
        return dict(response.headers or ())[b":status"]

    async def request(self, stream: int = 1, path: bytes = b"/", *, end: bool = True) -> None:
        """Send a GET."""
        head = [
            (b":method", b"GET"),
            (b":scheme", b"http"),
            (b":path", path),
            (b":authority", b"a"),
        ]
        self.h2.send_headers(stream, head, end_stream=end)
        await self.flush()


@contextlib.asynccontextmanager
async def peer_of(served: Installation) -> AsyncIterator[Peer]:
    """Connect a client."""
    async with served.client() as client:
        yield Peer(client, client_side=True)


Script = Callable[[Peer], Awaitable[None]]


@contextlib.asynccontextmanager
async def scripted_replica(script: Script) -> AsyncIterator[ReplicaEntry]:
    """Serve each connection by a script, which ends it."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(AssertionError, ConnectionError):
            await script(Peer(Client(reader, writer), client_side=False))
        writer.close()

    server = await asyncio.start_server(serve, LOOPBACK, 0)
    try:
        yield ReplicaEntry(LOOPBACK, {"http": server.sockets[0].getsockname()[1]})
    finally:
        server.close()


@contextlib.asynccontextmanager
async def scripted_installation(script: Script) -> AsyncIterator[tuple[Installation, Peer]]:
    """Serve a scripted replica by a gateway, with a client."""
    async with (
        scripted_replica(script) as entry,
        installation() as served,
        peer_of(served) as peer,
    ):
        await served.update(version("v1", entry))
        yield served, peer


def respond(peer: Peer, stream: int, status: bytes = b"200", *, end: bool = True) -> None:
    """Send the head of a response."""
    peer.h2.send_headers(stream, [(b":status", status)], end_stream=end)
