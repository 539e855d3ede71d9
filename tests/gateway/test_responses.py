"""What of responses reaches a client, and what it sees of replicas that fail."""

import asyncio
import re

import pytest

from tests.gateway.harness import ANSWER, GET, OK, POST, FakeReplica, Installation, installation
from tests.waiting import eventually, until

HEAD = GET.replace(b"GET", b"HEAD")
LARGE = 50_000_000
DATE, DATE_BYTES = re.compile(rb"date: [^\r]+\r\n"), 37


def closing_replica(response: bytes) -> FakeReplica:
    """Return a replica that closes each connection after these bytes."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await replica.read(reader)
        writer.write(response)
        await writer.drain()

    replica = FakeReplica(handler=handle)
    return replica


@pytest.mark.parametrize(
    ("sent", "received"),
    [
        (OK, b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"),
        (
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\nX-Sum: 1\r\n\r\n",
            b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n0\r\nx-sum: 1\r\n\r\n",
        ),
        (b"HTTP/1.1 204 No Content\r\nX: 1\r\n\r\n", b"HTTP/1.1 204 No Content\r\nx: 1\r\n\r\n"),
        (
            b"HTTP/1.1 304 Not Modified\r\nContent-Length: 9\r\n\r\n",
            b"HTTP/1.1 304 Not Modified\r\ncontent-length: 9\r\n\r\n",
        ),
        (
            b"HTTP/1.1 200 Fine\r\nConnection: close\r\nKeep-Alive: 3\r\nServer: own\r\n"
            b"Set-Cookie: a\r\nSet-Cookie: b\r\nContent-Length: 0\r\n\r\n",
            b"HTTP/1.1 200 OK\r\nserver: own\r\nset-cookie: a\r\nset-cookie: b\r\ncontent-length: 0\r\n\r\n",
        ),
        (
            b"HTTP/1.0 200 OK\r\nX: 1\r\n\r\nuntil the end",
            b"HTTP/1.1 200 OK\r\nx: 1\r\ntransfer-encoding: chunked\r\n\r\nd\r\nuntil the end\r\n0\r\n\r\n",
        ),
        (
            b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n" + OK,
            b"HTTP/1.1 103 Unknown\r\nlink: </a>\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok",
        ),
    ],
)
async def test_response_reaches_client_when_connection_stays(sent: bytes, received: bytes) -> None:
    """A response arrives as it was sent, but for what concerns the replica's connection."""
    async with installation(closing_replica(sent)) as served, served.client() as client:
        # The same connection serves another request.
        for _ in range(2):
            await client.send(GET)
            got = await client.reader.readexactly(len(received) + DATE_BYTES)
            assert DATE.sub(b"", got) == received


async def test_response_ends_with_connection_when_client_speaks_http10() -> None:
    """A client of HTTP/1.0 gets no chunks."""
    sent = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n"
    async with installation(closing_replica(sent)) as served:
        response = await served.send(b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
    assert response.count(b"HTTP/1.") == 1
    assert b"transfer-encoding" not in response
    assert b"\r\nconnection: close\r\n" in response
    assert response.endswith(b"\r\n\r\nok")


async def test_head_has_no_body() -> None:
    """The length in a response to HEAD is that of a body that does not come."""
    replica = FakeReplica(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
    async with installation(replica) as served, served.client() as client:
        for _ in range(3):
            await client.send(HEAD)
            assert b"\r\ncontent-length: 1000\r\n" in await client.head()
        await served.until_metric("requests", 0)
    assert replica.connections == 1


@pytest.mark.parametrize("waits", [False, True])
async def test_continue_comes_from_the_replica(waits: bool) -> None:
    """A client that waits before it sends its body waits for the replica."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        assert b"\r\nexpect: 100-continue\r\n" in head
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        body = await reader.readexactly(3)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\n" + body)

    replica = FakeReplica(handler=handle)
    async with replica.serve(), installation() as served, served.client() as client:
        if not waits:
            await served.start(replica)
        await client.send(POST.replace(b"\r\n\r\nabc", b"\r\nExpect: 100-continue\r\n\r\n"))
        if waits:
            await served.waiting(1)
            await served.start(replica)
        assert await client.head() == b"HTTP/1.1 100 Continue\r\n\r\n"
        await client.send(b"abc")
        assert await client.answer() == (200, b"abc")


async def test_early_response_reaches_client_when_body_is_incomplete() -> None:
    """A replica that refuses a body before its end is heard, and both connections end."""

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 413 Content Too Large\r\nContent-Length: 2\r\n\r\nno")
        await reader.read()

    replica = FakeReplica(handler=refuse)
    async with installation(replica) as served:
        response = await served.send(HEAD_OF_LARGE_BODY + b"abc")
        await until(lambda: replica.ended)
        await served.until_metric("requests", 0)
    assert response.startswith(b"HTTP/1.1 413 ")
    assert b"\r\nconnection: close\r\n" in response
    assert response.endswith(b"\r\n\r\nno")


HEAD_OF_LARGE_BODY = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % LARGE


@pytest.mark.parametrize(
    "sent",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\nzz\r\n",
    ],
)
async def test_client_sees_an_error_when_response_ends_early(sent: bytes) -> None:
    """An incomplete response never looks complete: its length or its last chunk is missing."""
    async with installation(closing_replica(sent)) as served, served.client() as client:
        await client.send(GET)
        received = await client.rest()
        await served.until_metric("requests", 0)
        assert await served.metric("rejected_total", reason="replica_failed") == 1
    assert b"content-length: 9\r\n" in received or b"\r\n0\r\n" not in received


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
    ],
)
async def test_client_gets_an_error_when_replica_sends_no_response(sent: bytes) -> None:
    """A replica that fails before its response gives 502, and no connection is used again."""
    replica = closing_replica(sent)
    async with installation(replica) as served, served.client() as client:
        status, _ = await client.fetch(POST)
        assert status == 502
        await served.until_metric("requests", 0)
        assert await served.metric("rejected_total", reason="replica_failed") == 1
    assert len(replica.heads) == 1


@pytest.mark.xfail(reason="Envoy passes the status on")
async def test_client_gets_an_error_when_replica_switches_unasked() -> None:
    """A replica that says that it speaks another protocol now, although nobody wanted that."""
    switch = (
        b"HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n"
    )
    async with installation(closing_replica(switch)) as served, served.client() as client:
        assert (await client.fetch(POST))[0] == 502


async def test_second_response_answers_nothing() -> None:
    """What a replica sends beyond its response is not taken for the next one."""
    replica = FakeReplica(OK + OK.replace(b"ok", b"no"))
    async with installation(replica) as served, served.client() as client:
        for _ in range(3):
            assert await client.fetch() == ANSWER
            # Without a pause the next request meets what ends the connection.
            await until(lambda: replica.ended == replica.connections)
    assert replica.connections == 3


async def test_hangup_ends_request_at_replica() -> None:
    """A replica sees at once that nobody waits for its response."""
    gone = asyncio.Event()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await replica.read(reader)
        await asyncio.wait([asyncio.ensure_future(reader.read())])
        gone.set()

    replica = FakeReplica(handler=handle)
    async with installation(replica) as served:
        async with served.client() as client:
            await client.send(GET)
            await until(lambda: replica.heads)
            await served.until_metric("requests", 1)
        await gone.wait()
        await served.until_metric("requests", 0)
        assert await served.metric("abandoned_total") == 1


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


class Pace:
    """Counts the bytes that one side has written.

    Attributes:
        sent: Their number.
    """

    def __init__(self) -> None:
        self.sent = self._before = 0
        self._same = 0

    async def has_stopped(self) -> bool:
        """Return whether the number has not changed in the last 50 looks."""
        self._same = self._same + 1 if self.sent == self._before else 0
        self._before = self.sent
        return self._same > 50

    async def write(self, writer: asyncio.StreamWriter) -> None:
        """Write a large body."""
        while self.sent < LARGE:
            writer.write(bytes(100_000))
            await writer.drain()
            self.sent += 100_000


async def test_replica_waits_when_client_does_not_read() -> None:
    """A response that nobody reads is not kept in the gateway's memory."""
    pace = Pace()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % LARGE)
        await pace.write(writer)

    async with installation(FakeReplica(handler=handle)) as served, served.client() as client:
        memory = await served.envoy_memory_kib()
        await client.send(GET)
        await client.head()
        await eventually(pace.has_stopped)
        assert pace.sent < LARGE * 3 // 4
        assert await served.envoy_memory_kib() - memory < 8_000
        assert len(await client.reader.readexactly(LARGE)) == LARGE


async def test_client_waits_when_replica_does_not_read() -> None:
    """A body that no replica reads is not kept in the gateway's memory."""
    go_on, pace = asyncio.Event(), Pace()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        await go_on.wait()
        left = LARGE
        while left:
            left -= len(await reader.read(min(left, 1_000_000)))
        writer.write(OK)

    async with installation(FakeReplica(handler=handle)) as served, served.client() as client:
        memory = await served.envoy_memory_kib()
        await client.send(HEAD_OF_LARGE_BODY)
        sending = asyncio.create_task(pace.write(client.writer))
        await eventually(pace.has_stopped)
        assert pace.sent < LARGE * 3 // 4
        assert await served.envoy_memory_kib() - memory < 8_000
        go_on.set()
        await sending
        assert await client.answer() == ANSWER


UPGRADE = (
    b"GET /ws HTTP/1.1\r\nHost: a\r\nConnection: keep-alive, Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Key: k\r\n\r\n"
)


@pytest.mark.parametrize("waits", [False, True])
async def test_websocket_bytes_pass_both_ways(waits: bool) -> None:
    """After the switch bytes pass unchanged, also those that came with it."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        assert b"\r\nupgrade: websocket\r\n" in head
        writer.write(
            b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            b"Sec-WebSocket-Accept: x\r\n\r\n\x81\x00"
        )
        while data := await reader.read(100):
            writer.write(data.upper())

    replica = FakeReplica(handler=handle)
    async with replica.serve(), installation() as served:
        if not waits:
            await served.start(replica)
        async with served.client() as client:
            await client.send(UPGRADE)
            if waits:
                await served.waiting(1)
                await served.start(replica)
            head = await client.head()
            assert head.startswith(b"HTTP/1.1 101 ")
            assert b"\r\nsec-websocket-accept: x\r\n" in head
            assert await client.reader.readexactly(2) == b"\x81\x00"
            await client.send(b"later\r\n\r\nGET / HTTP/1.1\r\n")
            assert await client.reader.readexactly(25) == b"LATER\r\n\r\nGET / HTTP/1.1\r\n"
            await served.until_metric("requests_in_flight", 1, version="v1")
        await until(lambda: replica.ended == replica.connections)
        await served.until_metric("requests", 0)


async def test_websocket_may_be_refused() -> None:
    """A replica may answer a request for a websocket with an error."""
    refusal = b"HTTP/1.1 403 Forbidden\r\nContent-Length: 2\r\n\r\nno"
    async with installation(FakeReplica(refusal)) as served, served.client() as client:
        assert await client.fetch(UPGRADE) == (403, b"no")


@pytest.mark.xfail(reason="Envoy drops the body of a 200")
async def test_websocket_may_be_ignored() -> None:
    """A replica may answer a request for a websocket as if it were an ordinary one."""
    async with installation(FakeReplica()) as served, served.client() as client:
        await client.send(UPGRADE)
        assert b"ok" in (await client.rest()).partition(b"\r\n\r\n")[2]


async def counts(served: Installation) -> dict[str, float]:
    """Return the figures of requests."""
    rows = {"200": 0.0, "404": 0.0, "500": 0.0}
    for status in rows:
        rows[status] = await served.metric("responses_total", version="v1", status=status)
    return rows


async def test_responses_are_counted_by_version_and_status() -> None:
    """What replicas answer is theirs; the gateway's own errors are others."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            status = (await replica.read(reader)).split(b" ")[1].strip(b"/")
            writer.write(b"HTTP/1.1 %s X\r\nContent-Length: 0\r\n\r\n" % status)

    replica = FakeReplica(handler=handle)
    async with installation(replica) as served, served.client() as client:
        for status in (200, 200, 404, 500, 200):
            request = b"GET /%d HTTP/1.1\r\nHost: a\r\n\r\n" % status
            assert (await client.fetch(request))[0] == status
        assert await counts(served) == {"200": 3, "404": 1, "500": 1}
        await served.until_metric("request_seconds_count", 5, version="v1")
        assert await served.metric("request_seconds_bucket", version="v1", le="+Inf") == 5
        assert await served.metric("rejected_total", reason="replica_failed") == 0
        assert await served.metric("connections") == 1
        assert await served.metric("version_weight", version="v1") == 1
        assert await served.metric("replicas", version="v1", state="ready") == 1
