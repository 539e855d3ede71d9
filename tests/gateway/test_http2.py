"""gRPC and other HTTP/2 through the gateway: real gRPC on both sides, and peers that break the rules."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable

import grpc
import pytest
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import (
    ConnectionTerminated,
    DataReceived,
    Event,
    ResponseReceived,
    StreamEnded,
    StreamReset,
    WindowUpdated,
)
from hyperframe.frame import GoAwayFrame, PingFrame, RstStreamFrame

from fenka.gateway import http2_client, http2_connection
from fenka.gateway.client_registry import ClientTimeouts
from fenka.gateway.dispatcher import BufferLimits
from fenka.gateway.http2_client import Http2ClientConnection
from fenka.gateway.http2_connection import MAX_STREAMS, PREFACE, STREAM_WINDOW, GoAwayFilter
from fenka.gateway.server import GatewayLimits
from fenka.jobs.routing_table import ReplicaEntry
from tests.gateway.harness import LOOPBACK, Client, Installation, installation, table, version
from tests.waiting import until

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
    model: Model, limits: GatewayLimits | None = None
) -> AsyncIterator[tuple[Installation, grpc.aio.Channel]]:
    """Serve a model by a gateway, with a client."""
    async with (
        model.serve() as entry,
        installation(limits=limits or GatewayLimits()) as served,
        channel_to(served) as channel,
    ):
        served.dispatcher.update(table(version("v1", entry)))
        yield served, channel


async def test_grpc_call_passes_with_metadata() -> None:
    """A call arrives with its metadata and the client's address, the answer with its trailers."""
    model = Model()
    async with grpc_installation(model) as (served, channel):
        call = unary(channel, "Infer")(b"1", metadata=(("x-own", "2"),))
        assert await call == b"model1"
        assert dict(await call.trailing_metadata())["x-cost"] == "1"
        assert served.dispatcher.statistics.responses["v1", 200] == 1
        await until(lambda: not served.in_flight)
    assert model.peer_metadata["x-own"] == "2"
    assert model.peer_metadata["x-forwarded-for"] == "127.0.0.1"


async def test_grpc_error_passes() -> None:
    """A status other than OK arrives with its message."""
    async with grpc_installation(Model()) as (_, channel):
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await unary(channel, "Fail")(b"")
    assert error.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert error.value.details() == "no model is loaded"


async def test_grpc_stream_passes_both_ways() -> None:
    """Each message of a stream arrives before the next one is sent."""
    async with grpc_installation(Model()) as (_, channel):
        chat: grpc.aio.StreamStreamMultiCallable[bytes, bytes]
        chat = channel.stream_stream(METHOD.format("Chat"))
        call = chat()
        for message in (b"a", b"b" * 200_000, b"", b"c"):
            await call.write(message)
            assert await call.read() == message.upper()
        await call.done_writing()
        assert await call.code() is grpc.StatusCode.OK


async def test_large_messages_pass() -> None:
    """Bodies larger than any window arrive complete, several at a time."""
    async with grpc_installation(Model(b"")) as (_, channel):
        infer = unary(channel, "Infer")
        body = bytes(range(256)) * 20_000
        assert await asyncio.gather(*(infer(body) for _ in range(4))) == [body] * 4


async def test_many_calls_share_connections() -> None:
    """Calls that come at once are all answered."""
    model = Model(b"")
    async with grpc_installation(model) as (served, channel):
        infer = unary(channel, "Infer")
        answers = await asyncio.gather(*(infer(b"%d" % number) for number in range(300)))
        assert answers == [b"%d" % number for number in range(300)]
        await until(lambda: not served.in_flight)


async def test_calls_of_one_connection_are_weighted() -> None:
    """Each call gets a replica of its own, although the client has one connection."""
    stable, canary = Model(b"v1"), Model(b"v2")
    async with (
        stable.serve() as first,
        canary.serve() as second,
        installation() as served,
        channel_to(served) as channel,
    ):
        versions = version("v1", first, weight=90), version("v2", second, weight=10)
        served.dispatcher.update(table(*versions))
        infer = unary(channel, "Infer")
        answers = [await infer(b"") for _ in range(100)]
    assert (answers.count(b"v1"), answers.count(b"v2")) == (90, 10)


async def test_cancelled_call_ends_at_replica() -> None:
    """A replica sees that nobody waits for its answer, and other calls go on."""
    model = Model()
    async with grpc_installation(model) as (served, channel):
        hold = unary(channel, "Hold")
        call = hold(b"")
        await until(lambda: model.calls)
        other = hold(b"")
        await until(lambda: model.calls == 2)
        call.cancel()
        await until(lambda: model.cancelled)
        assert served.in_flight == 1
        model.go_on.set()
        assert await other == b"model"


async def test_hangup_ends_calls_at_replica() -> None:
    """A client's connection that ends takes its calls along."""
    model = Model()
    async with grpc_installation(model) as (served, _):
        async with channel_to(served) as other:
            calls = [unary(other, "Hold")(b"") for _ in range(3)]
            await until(lambda: model.calls == 3)
            await other.close(None)
        await until(lambda: model.cancelled == 3)
        await until(lambda: not served.in_flight)
        assert all(call.done() for call in calls)


async def test_call_waits_until_a_replica_is_ready() -> None:
    """A call to a service without replicas is answered by the one that starts."""
    model = Model()
    async with model.serve() as entry, installation() as served, channel_to(served) as channel:
        infer = unary(channel, "Infer")
        calls = [asyncio.ensure_future(infer(b"%d" % number)) for number in range(5)]
        await until(lambda: len(served.dispatcher.buffer) == 5)
        served.dispatcher.update(table(version("v1", entry)))
        assert await asyncio.gather(*calls) == [b"model%d" % number for number in range(5)]


async def test_call_is_unavailable_when_no_replica_comes() -> None:
    """The gateway's own 503 is UNAVAILABLE to gRPC."""
    limits = GatewayLimits(buffer=BufferLimits(wait_s=0.01))
    async with installation(limits=limits) as served, channel_to(served) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await unary(channel, "Infer")(b"")
    assert error.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_terminating_replica_finishes_its_calls_and_gets_no_other() -> None:
    """A replica that ends answers what it has; the client's connection stays."""
    old, new = Model(b"old"), Model(b"new")
    async with grpc_installation(old) as (served, channel), new.serve() as entry:
        held = unary(channel, "Hold")(b"")
        await until(lambda: old.calls)
        served.dispatcher.update(table(version("v1", entry)))
        assert await unary(channel, "Infer")(b"") == b"new"
        old.go_on.set()
        assert await held == b"old"
    assert old.calls == 1


async def test_drained_gateway_finishes_calls() -> None:
    """A gateway that ends answers what it has."""
    model = Model()
    async with grpc_installation(model) as (served, channel):
        held = unary(channel, "Hold")(b"")
        await until(lambda: model.calls)
        draining = asyncio.create_task(served.gateway.drain())
        model.go_on.set()
        assert await held == b"model"
        await draining


# ---- peers that are not gRPC ----


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

    async def request(self, stream: int = 1, method: bytes = b"GET") -> None:
        """Send a request without a body."""
        head = [
            (b":method", method),
            (b":scheme", b"http"),
            (b":path", b"/"),
            (b":authority", b"a"),
        ]
        self.h2.send_headers(stream, head, end_stream=True)
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
        served.dispatcher.update(table(version("v1", entry)))
        yield served, peer


def respond(peer: Peer, stream: int, status: bytes = b"200", *, end: bool = True) -> None:
    """Send the head of a response."""
    peer.h2.send_headers(stream, [(b":status", status)], end_stream=end)


async def expect_status(peer: Peer, status: bytes) -> None:
    """Receive the head of a response with this status."""
    response = await peer.receive(ResponseReceived)
    assert isinstance(response, ResponseReceived)
    assert response.headers is not None
    assert (b":status", status) in response.headers


async def test_replica_that_goes_away_finishes_its_streams() -> None:
    """After GOAWAY streams below go on, those above are refused, and new ones get another connection."""
    connections = 0

    async def script(peer: Peer) -> None:
        nonlocal connections
        connections += 1
        await peer.receive(StreamEnded)
        if connections > 1:
            respond(peer, 1, b"201")
            await peer.flush()
            await peer.client.rest()
        await peer.receive(StreamEnded)
        goaway = GoAwayFrame(0, last_stream_id=1).serialize()
        await peer.client.send(goaway[:5])
        await peer.client.send(goaway[5:])
        respond(peer, 1, end=False)
        peer.h2.send_data(1, b"whole", end_stream=True)
        await peer.flush()
        await peer.client.rest()

    async with scripted_installation(script) as (served, peer):
        await peer.request(1)
        await peer.request(3)
        reset = await peer.receive(StreamReset)
        assert isinstance(reset, StreamReset)
        assert (reset.stream_id, reset.error_code) == (3, ErrorCodes.REFUSED_STREAM)
        data = await peer.receive(DataReceived)
        assert isinstance(data, DataReceived)
        assert data.data == b"whole"
        await peer.request(5)
        await peer.receive(ResponseReceived)
        response = await peer.receive(ResponseReceived)
        assert isinstance(response, ResponseReceived)
        assert response.headers is not None
        assert (b":status", b"201") in response.headers
        await until(lambda: not served.in_flight)


@pytest.mark.parametrize("begun", [False, True])
async def test_client_sees_an_error_when_replica_closes(begun: bool) -> None:
    """A replica that dies gives 502, or a reset if its response had begun."""

    async def script(peer: Peer) -> None:
        await peer.receive(StreamEnded)
        if begun:
            respond(peer, 1, end=False)
            peer.h2.send_data(1, b"part")
            await peer.flush()

    async with scripted_installation(script) as (served, peer):
        await peer.request()
        await expect_status(peer, b"200" if begun else b"502")
        await peer.receive(StreamReset if begun else StreamEnded)
        assert served.in_flight == 0


async def test_client_sees_an_error_when_replica_speaks_http1() -> None:
    """A replica that does not speak HTTP/2 gives 502."""

    async def script(peer: Peer) -> None:
        await peer.client.send(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
        await peer.client.rest()

    async with scripted_installation(script) as (served, peer):
        await peer.request()
        await expect_status(peer, b"502")
        assert served.in_flight == 0


async def test_reset_of_a_replica_reaches_the_client() -> None:
    """A stream that its replica resets is reset with the same code, and the connection stays."""

    async def script(peer: Peer) -> None:
        for stream in (1, 3):
            await peer.receive(StreamEnded)
            peer.h2.reset_stream(stream, ErrorCodes.ENHANCE_YOUR_CALM)
            await peer.flush()
        await peer.client.rest()

    async with scripted_installation(script) as (served, peer):
        for stream in (1, 3):
            await peer.request(stream)
            reset = await peer.receive(StreamReset)
            assert isinstance(reset, StreamReset)
            assert reset.error_code == ErrorCodes.ENHANCE_YOUR_CALM
        assert served.in_flight == 0


async def test_unknown_error_code_reaches_the_client() -> None:
    """Codes of extensions pass unchanged."""

    async def script(peer: Peer) -> None:
        await peer.receive(StreamEnded)
        await peer.client.send(RstStreamFrame(1, error_code=0x1234).serialize())
        await peer.client.rest()

    async with scripted_installation(script) as (served, peer):
        await peer.request()
        reset = await peer.receive(StreamReset)
        assert isinstance(reset, StreamReset)
        assert reset.error_code == 0x1234
        assert served.in_flight == 0


async def test_client_sees_an_error_when_status_is_no_number() -> None:
    """A response without a valid status is no response."""

    async def script(peer: Peer) -> None:
        await peer.receive(StreamEnded)
        respond(peer, 1, b"ok")
        await peer.flush()
        await peer.client.rest()

    async with scripted_installation(script) as (served, peer):
        await peer.request()
        await expect_status(peer, b"502")
        assert served.in_flight == 0


async def test_other_streams_go_on_when_client_resets_one_that_it_has_granted_window() -> None:
    """Frames that come together are understood in their order, and concern their stream only."""

    async def script(peer: Peer) -> None:
        await peer.receive(StreamEnded)
        respond(peer, 1, end=False)
        for _ in range(4):
            peer.h2.send_data(1, bytes(16383))
        await peer.flush()
        await peer.receive(WindowUpdated)
        await peer.receive(StreamEnded)
        respond(peer, 3)
        await peer.flush()
        await peer.client.rest()

    async with scripted_installation(script) as (served, peer):
        peer.h2.update_settings({4: 20_000})
        await peer.request()
        assert await peer.receive(ResponseReceived)
        stream = next(iter(served.gateway.clients.connections))
        assert isinstance(stream, Http2ClientConnection)
        await until(lambda: stream.sending and next(iter(stream.sending.values())).waits)
        peer.h2.increment_flow_control_window(30_000, 1)
        peer.h2.reset_stream(1)
        await peer.request(3)
        assert await peer.receive(ResponseReceived)
        assert await peer.receive(StreamEnded)
        await until(lambda: not served.in_flight)


async def test_early_response_ends_the_request() -> None:
    """A replica that answers without the rest of a body is heard, and the client may stop."""

    async def script(peer: Peer) -> None:
        await peer.receive(DataReceived)
        respond(peer, 1, b"413")
        await peer.flush()
        await peer.client.rest()

    async with scripted_installation(script) as (served, peer):
        head = [
            (b":method", b"POST"),
            (b":scheme", b"http"),
            (b":path", b"/"),
            (b":authority", b"a"),
        ]
        peer.h2.send_headers(1, head)
        peer.h2.send_data(1, b"part")
        await peer.flush()
        assert await peer.receive(ResponseReceived)
        reset = await peer.receive(StreamReset)
        assert isinstance(reset, StreamReset)
        assert reset.error_code == ErrorCodes.NO_ERROR
        await until(lambda: not served.in_flight)


async def test_replica_waits_when_client_does_not_read() -> None:
    """What a client has no window for stays at the replica."""
    sent = 0

    async def script(peer: Peer) -> None:
        nonlocal sent
        await peer.receive(StreamEnded)
        respond(peer, 1, end=False)
        while True:
            while room := min(16384, peer.h2.local_flow_control_window(1)):
                peer.h2.send_data(1, bytes(room))
                sent += room
            await peer.flush()
            data = await peer.client.reader.read(65536)
            assert data
            peer.h2.receive_data(data)

    async with scripted_installation(script) as (served, peer):
        await peer.request()
        await until(lambda: sent >= 65535)
        for _ in range(2000):
            await asyncio.sleep(0)
        assert sent < 200_000
        assert served.in_flight == 1


async def test_stream_is_reset_when_client_grants_no_window() -> None:
    """A replica is not held by a client that does not read a stream."""

    async def script(peer: Peer) -> None:
        await peer.receive(StreamEnded)
        respond(peer, 1, end=False)
        peer.h2.send_data(1, b"never read")
        await peer.flush()
        await peer.receive(StreamReset)
        await peer.client.rest()

    limits = GatewayLimits(clients=ClientTimeouts(unread_s=0.01))
    async with (
        scripted_replica(script) as entry,
        installation(limits=limits) as served,
        peer_of(served) as peer,
    ):
        served.dispatcher.update(table(version("v1", entry)))
        peer.h2.update_settings({4: 0})
        await peer.request()
        assert await peer.receive(StreamReset)
        await until(lambda: not served.in_flight)


@pytest.mark.parametrize(
    "data",
    [
        PREFACE + b"\0\0\0\1\0\0\0\0\0",
        PREFACE + b"\xff\xff\xff\0\0\0\0\0\1",
        PREFACE[:-1] + b"x",
        PREFACE + b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
    ],
)
async def test_connection_ends_when_client_breaks_the_protocol(data: bytes) -> None:
    """A connection that is no HTTP/2 ends, and leaves nothing behind."""
    async with installation() as served:
        await served.send(data)
        await until(lambda: not served.gateway.clients.connections)
        assert len(served.dispatcher.buffer) == 0


async def test_connection_ends_when_client_resets_too_many_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A client that opens and resets requests without end loses its connection."""
    monkeypatch.setattr(http2_client, "MAX_RESETS", 50)
    monkeypatch.setattr(http2_client, "REGAINED_PER_CHECK", 0)
    async with installation() as served, peer_of(served) as peer:
        with contextlib.suppress(ConnectionError):
            for stream in range(1, 401, 2):
                await peer.request(stream)
                peer.h2.reset_stream(stream)
                await peer.flush()
        await until(lambda: not served.gateway.clients.connections)
        assert len(served.dispatcher.buffer) == 0


async def test_connection_ends_when_client_does_not_read_answers_to_pings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Frames that a client makes the gateway send are bounded."""
    monkeypatch.setattr(http2_connection, "MAX_UNSENT_BYTES", 10_000)
    async with installation() as served, peer_of(served) as peer:
        await peer.request()
        await until(lambda: len(served.dispatcher.buffer))
        (connection,) = served.gateway.clients.connections
        assert isinstance(connection, Http2ClientConnection)
        assert connection._transport is not None
        kernel = connection._transport.get_extra_info("socket")
        kernel.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        pings = PingFrame(0, opaque_data=b"12345678").serialize() * 1000
        with contextlib.suppress(ConnectionError):
            for _ in range(1000):
                await peer.client.send(pings)
        await until(lambda: not served.gateway.clients.connections)


async def test_window_of_connection_exceeds_those_of_all_streams() -> None:
    """A request that waits does not hold up others on its connection."""
    async with installation() as served, peer_of(served) as peer:
        await peer.request()
        assert await peer.receive(WindowUpdated)
        assert peer.h2.outbound_flow_control_window > MAX_STREAMS * STREAM_WINDOW


async def test_connect_is_refused() -> None:
    """A service is no forward proxy."""
    async with installation() as served, peer_of(served) as peer:
        peer.h2.send_headers(
            1, [(b":method", b"CONNECT"), (b":authority", b"a:1")], end_stream=True
        )
        await peer.flush()
        response = await peer.receive(ResponseReceived)
        assert isinstance(response, ResponseReceived)
        assert response.headers is not None
        assert (b":status", b"405") in response.headers


async def test_idle_connection_ends_with_goaway() -> None:
    """A client that does nothing is told that its connection ends."""
    limits = GatewayLimits(clients=ClientTimeouts(idle_s=0.01))
    async with installation(limits=limits) as served, peer_of(served) as peer:
        await peer.flush()
        assert await peer.receive(ConnectionTerminated)
        await until(lambda: not served.gateway.clients.connections)


def test_filter_cuts_goaway_out_however_it_is_split() -> None:
    """Everything else passes unchanged."""
    ping = PingFrame(0, opaque_data=b"12345678").serialize()
    goaway = GoAwayFrame(0, last_stream_id=7, additional_data=b"bye").serialize()
    data = PREFACE + ping + goaway + ping
    for size in range(1, len(data)):
        pieces = GoAwayFilter(len(PREFACE))
        passed = b"".join(pieces.feed(data[at : at + size]) for at in range(0, len(data), size))
        assert passed == PREFACE + ping + ping
        assert pieces.last_stream == 7
