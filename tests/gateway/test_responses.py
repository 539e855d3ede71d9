"""What of responses reaches a client, and what it sees of replicas that fail."""

import asyncio

import pytest

from tests.gateway.harness import GET, OK, FakeReplica, Handler, installation
from tests.waiting import until

HEAD = GET.replace(b"GET", b"HEAD")
POST = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\n\r\nabc"


def once(response: bytes, *, replica: list[FakeReplica]) -> Handler:
    """Return a handler that answers one request with these bytes and closes."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await replica[0].read(reader)
        writer.write(response)
        await writer.drain()

    return handle


def closing_replica(response: bytes) -> FakeReplica:
    """Return a replica that closes each connection after these bytes."""
    itself: list[FakeReplica] = []
    itself.append(FakeReplica(handler=once(response, replica=itself)))
    return itself[0]


@pytest.mark.parametrize(
    ("sent", "received"),
    [
        (OK, OK),
        (
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\nX-Sum: 1\r\n\r\n",
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\nX-Sum: 1\r\n\r\n",
        ),
        (b"HTTP/1.1 204 No Content\r\nX: 1\r\n\r\n", b"HTTP/1.1 204 No Content\r\nX: 1\r\n\r\n"),
        (
            b"HTTP/1.1 304 Not Modified\r\nContent-Length: 9\r\n\r\n",
            b"HTTP/1.1 304 Not Modified\r\nContent-Length: 9\r\n\r\n",
        ),
        (
            b"HTTP/1.1 200 Fine\r\nConnection: close, X-Hop\r\nX-Hop: 1\r\nKeep-Alive: 3\r\n"
            b"Set-Cookie: a\r\nSet-Cookie: b\r\nContent-Length: 0\r\n\r\n",
            b"HTTP/1.1 200 Fine\r\nSet-Cookie: a\r\nSet-Cookie: b\r\nContent-Length: 0\r\n\r\n",
        ),
        (
            b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n" + OK,
            b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n" + OK,
        ),
        (
            b"HTTP/1.0 200 OK\r\nX: 1\r\n\r\nuntil the end",
            b"HTTP/1.1 200 OK\r\nX: 1\r\nTransfer-Encoding: chunked\r\n\r\nd\r\nuntil the end\r\n0\r\n\r\n",
        ),
    ],
)
async def test_response_reaches_client_when_connection_stays(sent: bytes, received: bytes) -> None:
    """A response arrives as it was sent, but for what concerns the replica's connection."""
    async with installation(closing_replica(sent)) as served, served.client() as client:
        await client.send(GET)
        assert await client.reader.readexactly(len(received)) == received
        # The same connection serves another request.
        await client.send(GET)
        assert await client.reader.readexactly(len(received)) == received


@pytest.mark.parametrize(
    ("sent", "received"),
    [
        (
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n",
            b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nok",
        ),
        (
            b"HTTP/1.1 103 Early Hints\r\n\r\nHTTP/1.1 200 OK\r\n\r\nok",
            b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nok",
        ),
    ],
)
async def test_response_ends_with_connection_when_client_speaks_http10(
    sent: bytes, received: bytes
) -> None:
    """A client of HTTP/1.0 gets neither chunks nor responses that precede the final one."""
    async with installation(closing_replica(sent)) as served:
        assert await served.send(b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n") == received


async def test_head_has_no_body() -> None:
    """The length in a response to HEAD is that of a body that does not come."""
    replica = FakeReplica(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
    async with installation(replica) as served, served.client() as client:
        for _ in range(3):
            await client.send(HEAD)
            assert await client.head() == replica.response
        assert served.in_flight == 0
    assert replica.connections == 1


async def test_continue_comes_from_the_replica() -> None:
    """A client that waits before it sends its body waits for the replica."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"Expect: 100-continue\r\n")
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        body = await reader.readexactly(3)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\n" + body)

    async with installation(FakeReplica(handler=handle)) as served, served.client() as client:
        await client.send(
            b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\nExpect: 100-continue\r\n\r\n"
        )
        assert await client.head() == b"HTTP/1.1 100 Continue\r\n\r\n"
        await client.send(b"abc")
        assert (await client.response()).endswith(b"\r\n\r\nabc")


async def test_early_response_reaches_client_when_body_is_incomplete() -> None:
    """A replica that refuses a body before its end is heard, and both connections end."""

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 413 Content Too Large\r\nContent-Length: 2\r\n\r\nno")
        await reader.read()

    replica = FakeReplica(handler=refuse)
    async with installation(replica) as served:
        response = await served.send(
            b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1000\r\n\r\nabc"
        )
        await until(lambda: replica.ended)
        assert served.in_flight == 0
    assert response == (
        b"HTTP/1.1 413 Content Too Large\r\nContent-Length: 2\r\nConnection: close\r\n\r\nno"
    )


@pytest.mark.parametrize(
    "sent",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\nzz\r\n",
    ],
)
async def test_client_sees_an_error_when_response_ends_early(sent: bytes) -> None:
    """An incomplete response never looks complete."""
    async with installation(closing_replica(sent)) as served, served.client() as client:
        await client.send(GET)
        with pytest.raises(ConnectionResetError):
            await client.rest()
        assert served.in_flight == 0


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"HTTP/1.1 200",
        b"nonsense\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 1000 + b"Content-Length: 2\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\nX: " + b"y" * 500_000,
        b"HTTP/1.1 100 Continue\r\n\r\n" * 20_000,
        b"HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n",
    ],
)
async def test_client_gets_bad_gateway_when_replica_sends_no_response(sent: bytes) -> None:
    """A replica that fails before its response gives one sentence, and no connection is used again."""
    replica = closing_replica(sent)
    async with installation(replica) as served, served.client() as client:
        await client.send(POST)
        while (head := await client.head()).startswith(b"HTTP/1.1 100"):
            pass
        assert head.startswith(b"HTTP/1.1 502 ")
        assert b"replica" in await client.reader.readline()
        assert served.in_flight == 0
    assert len(replica.heads) == 1


async def test_second_response_answers_nothing() -> None:
    """What a replica sends beyond its response is not taken for the next one."""
    replica = FakeReplica(OK + OK.replace(b"ok", b"no"))
    async with installation(replica) as served, served.client() as client:
        for _ in range(3):
            assert (await client.request()).endswith(b"\r\n\r\nok")
    assert replica.connections == 3


async def test_hangup_ends_request_at_replica() -> None:
    """A replica sees at once that nobody waits for its response."""
    gone = asyncio.Event()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        await asyncio.wait([asyncio.ensure_future(reader.read())])
        gone.set()

    replica = FakeReplica(handler=handle)
    async with installation(replica) as served:
        async with served.client() as client:
            await client.send(GET)
            await until(lambda: served.in_flight)
            await until(lambda: replica.connections)
        await gone.wait()
        await until(lambda: not served.in_flight)
        assert served.dispatcher.statistics.abandoned == 1


async def test_events_reach_client_one_by_one() -> None:
    """A stream of events is passed on as it comes."""
    steps: asyncio.Queue[bytes] = asyncio.Queue()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        while event := await steps.get():
            writer.write(b"%x\r\n%s\r\n" % (len(event), event))
        writer.write(b"0\r\n\r\n")

    async with installation(FakeReplica(handler=handle)) as served, served.client() as client:
        await client.send(GET)
        await client.head()
        for number in range(3):
            # The next event exists only after the client has read this one.
            steps.put_nowait(b"data: %d\n\n" % number)
            assert await client.reader.readexactly(14) == b"9\r\ndata: %d\n\n\r\n" % number
        steps.put_nowait(b"")
        assert await client.reader.readexactly(5) == b"0\r\n\r\n"


async def test_replica_waits_when_client_does_not_read() -> None:
    """A response that nobody reads is not kept in the gateway's memory."""
    sent = 0

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100000000\r\n\r\n")
        while sent < 100_000_000:
            writer.write(bytes(100_000))
            await writer.drain()
            sent += 100_000

    async with installation(FakeReplica(handler=handle)) as served, served.client() as client:
        await client.send(GET)
        await client.head()
        await until(lambda: served.connection.unread)
        for _ in range(10_000):
            await asyncio.sleep(0)  # A gateway that went on reading would now read everything.
        assert sent < 50_000_000
        assert len(await client.reader.readexactly(100_000_000)) == 100_000_000


async def test_client_waits_when_replica_does_not_read() -> None:
    """A body that no replica reads is not kept in the gateway's memory."""
    go_on = asyncio.Event()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        await go_on.wait()
        left = 100_000_000
        while left:
            left -= len(await reader.read(min(left, 1_000_000)))
        writer.write(OK)

    async with installation(FakeReplica(handler=handle)) as served, served.client() as client:
        await client.send(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 100000000\r\n\r\n")
        sending = asyncio.create_task(client.send(bytes(100_000_000)))
        await until(lambda: served.connection.paused)
        for _ in range(10_000):
            await asyncio.sleep(0)
        assert not sending.done()
        go_on.set()
        await sending
        assert await client.response() == OK


async def test_websocket_bytes_pass_both_ways() -> None:
    """After the switch bytes pass unchanged, also those that came with it."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        assert b"Connection: Upgrade\r\nUpgrade: websocket\r\n" in head
        writer.write(
            b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            b"Sec-WebSocket-Accept: x\r\n\r\n\x81\x00"
        )
        while data := await reader.read(100):
            writer.write(data.upper())

    replica = FakeReplica(handler=handle)
    request = (
        b"GET /ws HTTP/1.1\r\nHost: a\r\nConnection: keep-alive, Upgrade\r\nUpgrade: websocket\r\n"
        b"Sec-WebSocket-Key: k\r\n\r\n"
    )
    async with installation(replica) as served:
        async with served.client() as client:
            await client.send(request + b"early")
            head = await client.head()
            assert head.startswith(b"HTTP/1.1 101 ")
            assert b"Sec-WebSocket-Accept: x\r\n" in head
            assert await client.reader.readexactly(7) == b"\x81\x00EARLY"
            await client.send(b"later\r\n\r\nGET / HTTP/1.1\r\n")
            assert await client.reader.readexactly(25) == b"LATER\r\n\r\nGET / HTTP/1.1\r\n"
            assert served.in_flight == 1
        await until(lambda: replica.ended)
        await until(lambda: not served.in_flight)


async def test_connection_goes_on_when_websocket_is_refused() -> None:
    """A replica may answer a request for a websocket with an ordinary response."""
    async with installation(FakeReplica()) as served, served.client() as client:
        await client.send(
            b"GET /ws HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
            + GET
        )
        assert await client.response() == OK
        assert await client.response() == OK
