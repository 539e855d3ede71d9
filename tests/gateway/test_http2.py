"""gRPC and other HTTP/2 through the gateway: real gRPC on both sides, and peers that break the rules."""

import asyncio
import contextlib
from pathlib import Path

import grpc
import pytest
from h2.connection import ConnectionState
from h2.errors import ErrorCodes
from h2.events import (
    ConnectionTerminated,
    DataReceived,
    RemoteSettingsChanged,
    RequestReceived,
    StreamEnded,
    StreamReset,
    TrailersReceived,
)
from h2.exceptions import ProtocolError

from fenka.gateway.envoy_config import STREAMS
from tests.gateway.harness import ANSWER, OK, FakeReplica, installation
from tests.gateway.http2_peers import (
    METHOD,
    Model,
    Peer,
    channel_to,
    grpc_installation,
    peer_of,
    respond,
    scripted_installation,
    unary,
)
from tests.gateway.tables import version
from tests.gateway.test_responses import Pace
from tests.waiting import eventually, until

UNAVAILABLE = grpc.StatusCode.UNAVAILABLE


async def test_grpc_call_passes_with_metadata() -> None:
    """A call arrives with its metadata and the client's address, the answer with its trailers."""
    model = Model()
    async with grpc_installation(model) as (served, channel):
        call = unary(channel, "Infer")(b"1", metadata=(("x-own", "2"),))
        assert await call == b"model1"
        assert dict(await call.trailing_metadata())["x-cost"] == "1"
        assert await served.metric("responses_total", version="v1", status="200") == 1
        await served.until_metric("requests", 0)
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
    async with grpc_installation(Model(b"")) as (served, channel):
        infer = unary(channel, "Infer")
        answers = await asyncio.gather(*(infer(b"%d" % number) for number in range(300)))
        assert answers == [b"%d" % number for number in range(300)]
        await served.until_metric("requests", 0)


async def test_calls_of_one_connection_are_weighted() -> None:
    """Each call gets a replica of its own, although the client has one connection."""
    stable, canary = Model(b"v1"), Model(b"v2")
    async with (
        stable.serve() as first,
        canary.serve() as second,
        installation() as served,
        channel_to(served) as channel,
    ):
        await served.update(version("v1", first, weight=90), version("v2", second, weight=10))
        infer = unary(channel, "Infer")
        answers = [await infer(b"") for _ in range(100)]
    assert (answers.count(b"v1"), answers.count(b"v2")) == (90, 10)


async def test_calls_pass_to_a_unix_socket(tmp_path: Path) -> None:
    """A gRPC server at a Unix socket."""
    async with (
        Model().serve(str(tmp_path / "s")) as listening,
        installation() as served,
        channel_to(served) as channel,
    ):
        await served.update(version("v1", listening))
        assert await unary(channel, "Infer")(b"1") == b"model1"


async def test_http1_and_http2_share_a_port() -> None:
    """A replica gets the protocol that the client speaks."""
    replica, model = FakeReplica(), Model()
    async with (
        replica.serve(),
        model.serve() as entry,
        installation() as served,
        channel_to(served) as channel,
        served.client() as client,
    ):
        await served.start(replica)
        assert await client.fetch() == ANSWER
        await served.update(version("v1", entry))
        assert await unary(channel, "Infer")(b"1") == b"model1"
        await served.start(replica)
        assert await client.fetch() == ANSWER


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
        await served.until_metric("requests", 1)
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
        await served.until_metric("requests", 0)
        assert all(call.done() for call in calls)


async def test_call_waits_until_a_replica_is_ready() -> None:
    """Calls to a service without replicas are answered by the one that starts."""
    model = Model()
    async with model.serve() as entry, installation() as served, channel_to(served) as channel:
        infer = unary(channel, "Infer")
        calls = [asyncio.ensure_future(infer(b"%d" % number)) for number in range(5)]
        await served.waiting(5)
        await served.update(version("v1", entry))
        assert await asyncio.gather(*calls) == [b"model%d" % number for number in range(5)]
    assert model.calls == 5


async def test_large_messages_wait_until_a_replica_is_ready() -> None:
    """Messages larger than what is kept of each, beside a small one on the same connection."""
    async with Model(b"").serve() as entry, installation() as served, channel_to(served) as channel:
        infer = unary(channel, "Infer")
        bodies = [b"x" * 1_000_000, b"y" * 1_000_000, b"z"]
        calls = [asyncio.ensure_future(infer(body)) for body in bodies]
        await served.waiting(3)
        await served.update(version("v1", entry))
        assert await asyncio.gather(*calls) == bodies


async def test_call_is_unavailable_when_no_replica_comes() -> None:
    """The gateway's own 503 is UNAVAILABLE to gRPC."""
    async with installation(wait=0.01) as served, channel_to(served) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await unary(channel, "Infer")(b"")
    assert error.value.code() is UNAVAILABLE
    assert "no replica was ready within 0.01 s" in (error.value.details() or "")


async def test_call_leaves_when_it_is_cancelled() -> None:
    """A call that waits ends with its client, and no replica gets it."""
    model = Model()
    async with model.serve() as entry, installation() as served, channel_to(served) as channel:
        call = unary(channel, "Infer")(b"")
        await served.waiting(1)
        call.cancel()
        await served.waiting(0)
        await served.update(version("v1", entry))
        assert await unary(channel, "Infer")(b"") == b"model"
    assert model.calls == 1


async def test_replica_that_leaves_finishes_its_calls_and_gets_no_other() -> None:
    """It answers what it has; the client's connection stays."""
    old, new = Model(b"old"), Model(b"new")
    async with grpc_installation(old) as (served, channel), new.serve() as entry:
        held = unary(channel, "Hold")(b"")
        await until(lambda: old.calls)
        await served.update(version("v1", entry))
        assert await unary(channel, "Infer")(b"") == b"new"
        old.go_on.set()
        assert await held == b"old"
    assert old.calls == 1


# --- replicas that are not gRPC -------------------------------------------------------------------------


async def test_trailers_pass() -> None:
    """Fields after the body."""

    async def script(peer: Peer) -> None:
        await peer.receive(StreamEnded)
        respond(peer, 1, end=False)
        peer.h2.send_data(1, b"body")
        peer.h2.send_headers(1, [(b"x-sum", b"1")], end_stream=True)
        await peer.flush()
        await peer.client.rest()

    async with scripted_installation(script) as (_, peer):
        await peer.request()
        assert await peer.status() == b"200"
        trailers = await peer.receive(TrailersReceived)
        assert isinstance(trailers, TrailersReceived)
        assert (b"x-sum", b"1") in (trailers.headers or ())


async def test_replica_that_goes_away_finishes_its_streams() -> None:
    """After GOAWAY streams below go on, and new ones get another connection."""
    connections = 0

    async def script(peer: Peer) -> None:
        nonlocal connections
        await peer.receive(StreamEnded)
        connections += 1
        if connections > 1:
            respond(peer, 1, b"201")
            await peer.flush()
            await peer.client.rest()
            return
        respond(peer, 1, end=False)
        peer.h2.close_connection(last_stream_id=1)
        await peer.flush()
        await may_end.wait()
        # h2 refuses to write after GOAWAY.
        await peer.client.send(b"\0\0\5\0\1\0\0\0\1whole")
        await peer.client.rest()

    may_end = asyncio.Event()
    async with scripted_installation(script) as (served, peer):
        await peer.request(1)
        assert await peer.status() == b"200"
        await peer.request(3)
        assert await peer.status() == b"201"
        may_end.set()
        data = await peer.receive(DataReceived)
        assert isinstance(data, DataReceived)
        assert data.data == b"whole"
        await served.until_metric("requests", 0)


async def test_stream_that_its_replica_refuses_is_sent_again() -> None:
    """A replica says by REFUSED_STREAM that it has not begun."""
    connections = 0

    async def script(peer: Peer) -> None:
        nonlocal connections
        for stream in (1, 3, 5):
            await peer.receive(StreamEnded)
            connections += stream == 1
            if connections == 1 and stream == 1:
                peer.h2.reset_stream(stream, ErrorCodes.REFUSED_STREAM)
            else:
                respond(peer, stream)
            await peer.flush()

    async with scripted_installation(script) as (_, peer):
        await peer.request()
        assert await peer.status() == b"200"


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
        assert await peer.status() in ({b"200"} if begun else {b"502"})
        await peer.receive(StreamReset if begun else StreamEnded)
        await served.until_metric("requests", 0)


async def test_client_sees_an_error_when_replica_speaks_http1() -> None:
    """A replica that does not speak HTTP/2 gives 502."""

    async def script(peer: Peer) -> None:
        await peer.client.send(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
        await peer.client.rest()

    async with scripted_installation(script) as (served, peer):
        await peer.request()
        assert await peer.status() == b"502"
        await served.until_metric("requests", 0)


async def test_early_response_ends_the_request() -> None:
    """A replica that answers without the rest of a body is heard, and the client may stop."""

    async def script(peer: Peer) -> None:
        await peer.receive(DataReceived)
        respond(peer, 1, b"413")
        await peer.flush()
        await peer.client.rest()

    async with scripted_installation(script) as (served, peer):
        await peer.request(end=False)
        peer.h2.send_data(1, b"part")
        await peer.flush()
        assert await peer.status() == b"413"
        assert await peer.receive(StreamReset)
        await served.until_metric("requests", 0)


async def test_other_streams_go_on_when_client_resets_one() -> None:
    """A reset concerns its stream only."""

    async def script(peer: Peer) -> None:
        await peer.receive(StreamEnded)
        respond(peer, 1, end=False)
        await peer.flush()
        await peer.receive(StreamReset)
        await peer.receive(StreamEnded)
        respond(peer, 3)
        await peer.flush()
        await peer.client.rest()

    async with scripted_installation(script) as (served, peer):
        await peer.request()
        assert await peer.status() == b"200"
        peer.h2.reset_stream(1)
        await peer.request(3)
        assert await peer.status() == b"200"
        assert await peer.receive(StreamEnded)
        await served.until_metric("requests", 0)


async def test_replica_waits_when_client_does_not_read() -> None:
    """What a client has no window for stays at the replica."""
    pace = Pace()

    async def script(peer: Peer) -> None:
        await peer.receive(StreamEnded)
        respond(peer, 1, end=False)
        while True:
            while room := min(16384, peer.h2.local_flow_control_window(1)):
                peer.h2.send_data(1, bytes(room))
                pace.sent += room
            await peer.flush()
            data = await peer.client.reader.read(65536)
            assert data
            peer.h2.receive_data(data)

    async with scripted_installation(script) as (served, peer):
        await peer.request()
        await until(lambda: pace.sent >= 65535)
        await eventually(pace.has_stopped)
        # Windows of the client and of the gateway, and what is on the way.
        assert pace.sent < 2_000_000
        assert await served.metric("requests") == 1


async def test_stalled_streams_do_not_hold_up_others() -> None:
    """Bodies that wait, or that a replica does not read, and another request of the same connection."""

    async def script(peer: Peer) -> None:
        # Without reading of bodies, a replica grants no window.
        peer.h2.acknowledge_received_data = lambda *_: None  # type: ignore[method-assign]
        while True:
            request = await peer.receive(RequestReceived)
            assert isinstance(request, RequestReceived)
            if (b":path", b"/quick") in (request.headers or ()):
                respond(peer, request.stream_id or 0)
                await peer.flush()

    async with scripted_installation(script) as (_, peer):
        await peer.flush()
        await peer.receive(RemoteSettingsChanged)
        for number in range(STREAMS - 1):
            stream = 2 * number + 1
            await peer.request(stream, end=False)
            while room := min(16_384, peer.h2.local_flow_control_window(stream)):
                peer.h2.send_data(stream, bytes(room))
            await peer.flush()
        await peer.request(2 * STREAMS - 1, path=b"/quick")
        assert await peer.status() == b"200"


async def test_connect_is_refused() -> None:
    """A service is no forward proxy."""
    async with installation() as served, peer_of(served) as peer:
        head = [(b":method", b"CONNECT"), (b":authority", b"a:1")]
        peer.h2.send_headers(1, head, end_stream=True)
        await peer.flush()
        assert await peer.status() in {b"400", b"404", b"405"}


async def test_drained_gateway_says_goodbye() -> None:
    """A gateway that ends answers what it has, and its clients get GOAWAY."""
    model = Model()
    async with grpc_installation(model) as (served, channel), peer_of(served) as peer:
        held = unary(channel, "Hold")(b"")
        await until(lambda: model.calls)
        await served.gateway.announce_end()
        draining = asyncio.create_task(served.gateway.drain())
        await peer.request()
        await served.waiting(0)
        # h2 expects no response behind GOAWAY.
        with contextlib.suppress(ProtocolError):
            await peer.receive(ConnectionTerminated)
        assert peer.h2.state_machine.state is ConnectionState.CLOSED
        assert not draining.done()
        model.go_on.set()
        assert await held == b"model"
        with contextlib.suppress(ConnectionError):
            peer.client.close()
        await draining


async def test_client_of_the_wrong_protocol_costs_nobody_else() -> None:
    """A replica of HTTP/1 that HTTP/2 is sent to goes on getting requests."""
    replica = FakeReplica(handler=refuse_http2)
    async with installation(replica) as served, channel_to(served) as channel:
        async with served.client() as client:
            for _ in range(3):
                with pytest.raises(grpc.aio.AioRpcError):
                    await unary(channel, "Infer")(b"")
                assert await client.fetch() == ANSWER
        assert await served.metric("buffered_total") == 0


async def refuse_http2(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer as a server of HTTP/1 does."""
    while head := await reader.readuntil(b"\r\n\r\n"):
        if head.startswith(b"PRI"):
            writer.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
            return
        writer.write(OK)
