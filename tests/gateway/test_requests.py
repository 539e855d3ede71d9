"""What of requests reaches a replica: heads, bodies, and which requests are refused."""

import asyncio
import os

import msgspec
import pytest

from fenka.gateway.http1_client import MAX_PIPELINED
from tests.gateway.harness import GET, OK, FakeReplica, installation, table, version

CLOSE = b"Connection: close\r\n"


def status(response: bytes) -> int:
    """Return the status of a response."""
    return int(response.split(b" ", 2)[1])


async def test_request_reaches_replica_with_client_address() -> None:
    """A replica gets what the client sent, and the client's address."""
    replica = FakeReplica()
    async with installation(replica) as served, served.client() as client:
        response = await client.request(
            b"GET /a?b=c HTTP/1.1\r\nHost: service\r\nX-Own: 1\r\nX-Forwarded-For: 10.0.0.9\r\n\r\n"
        )
    assert response == b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
    assert replica.heads == [
        b"GET /a?b=c HTTP/1.1\r\nHost: service\r\nX-Own: 1\r\nX-Forwarded-For: 10.0.0.9, 127.0.0.1\r\n\r\n"
    ]


async def test_connection_to_replica_is_reused_when_it_stays_open() -> None:
    """Requests of several clients use one connection after the other."""
    replica = FakeReplica()
    async with installation(replica) as served:
        for _ in range(3):
            async with served.client() as client:
                await client.request()
                await client.request()
    assert (replica.connections, len(replica.heads)) == (1, 6)


@pytest.mark.parametrize(
    ("framing", "body"),
    [
        (b"Content-Length: 5\r\n", b"hello"),
        (
            b"Transfer-Encoding: chunked\r\n",
            b"2\r\nhe\r\n3;ext=1\r\nllo\r\n0\r\nX-Trailer: 1\r\n\r\n",
        ),
    ],
)
async def test_body_reaches_replica_when_sent_in_pieces(framing: bytes, body: bytes) -> None:
    """A body arrives complete, however it is framed and cut."""
    replica = FakeReplica()
    async with installation(replica) as served, served.client() as client:
        await client.send(b"POST / HTTP/1.1\r\nHost: a\r\n" + framing + b"\r\n")
        for at in range(len(body)):
            await client.send(body[at : at + 1])
        await client.response()
        await client.request()
    assert replica.bodies == [b"hello", b""]
    assert b"ext" not in replica.heads[1]


async def test_pipelined_requests_are_answered_in_order() -> None:
    """Requests that come at once are answered one after the other."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            target = (await replica.read(reader)).split(b" ")[1]
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(target), target))

    replica = FakeReplica(handler=echo)
    async with installation(replica) as served, served.client() as client:
        await client.send(
            b"GET /1 HTTP/1.1\r\nHost: a\r\n\r\n"
            b"POST /2 HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\n\r\nabc"
            b"GET /3 HTTP/1.1\r\nHost: a\r\n\r\n"
        )
        bodies = [(await client.response())[-2:] for _ in range(3)]
    assert bodies == [b"/1", b"/2", b"/3"]
    assert replica.bodies == [b"", b"abc", b""]


async def test_pipelining_is_bounded() -> None:
    """A client that sends too many requests at once is refused after those that were accepted."""
    replica = FakeReplica()
    async with installation(replica) as served:
        answers = await served.send(GET * (2 * MAX_PIPELINED))
    assert answers.count(b"HTTP/1.1 200 OK") == MAX_PIPELINED
    assert len(replica.heads) == MAX_PIPELINED


@pytest.mark.parametrize(
    "fields",
    [
        b"Connection: keep-alive, X-Secret\r\nX-Secret: 1\r\nKeep-Alive: 5\r\n",
        b"TE: trailers\r\nProxy-Connection: keep-alive\r\nProxy-Authorization: x\r\n",
        b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AA\r\n",
    ],
)
async def test_fields_of_the_connection_stay_on_the_connection(fields: bytes) -> None:
    """Hop-by-hop fields, and those that Connection names, do not reach the replica."""
    replica = FakeReplica()
    async with installation(replica) as served, served.client() as client:
        await client.request(b"GET / HTTP/1.1\r\nHost: a\r\n" + fields + b"\r\n")
        await client.request()
    assert replica.heads[0] == b"GET / HTTP/1.1\r\nHost: a\r\nX-Forwarded-For: 127.0.0.1\r\n\r\n"


async def test_connection_cannot_name_host_or_length() -> None:
    """A client cannot make the gateway drop the fields that frame its request."""
    replica = FakeReplica()
    async with installation(replica) as served, served.client() as client:
        await client.request(
            b"POST / HTTP/1.1\r\nHost: a\r\nConnection: content-length, host\r\n"
            b"Content-Length: 3\r\n\r\nabc"
        )
    assert replica.bodies == [b"abc"]
    assert b"Host: a\r\n" in replica.heads[0]


@pytest.mark.parametrize(
    ("target", "sent", "host"),
    [
        (b"http://other/p?q", b"/p?q", b"other"),
        (b"HTTP://other:81", b"/", b"other:81"),
        (b"*", b"*", b"a"),
    ],
)
async def test_target_is_sent_as_path(target: bytes, sent: bytes, host: bytes) -> None:
    """An absolute target becomes a path, and its host replaces the Host field."""
    replica = FakeReplica()
    method = b"OPTIONS" if target == b"*" else b"GET"
    async with installation(replica) as served, served.client() as client:
        await client.request(method + b" " + target + b" HTTP/1.1\r\nHost: a\r\n\r\n")
    assert replica.heads[0].startswith(
        method + b" " + sent + b" HTTP/1.1\r\nHost: " + host + b"\r\n"
    )


LENGTH = b"Content-Length: 3\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n"


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"POST / HTTP/1.1\r\nHost: a\r\n" + LENGTH + CHUNKED + b"\r\n0\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nHost: a\r\n" + CHUNKED + LENGTH + b"\r\n0\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nHost: a\r\n" + LENGTH + b"Content-Length: 4\r\n\r\nabc", 400),
        (b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: +3\r\n\r\nabc", 400),
        (b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: xchunked\r\n\r\n", 501),
        (b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 501),
        (b"POST / HTTP/1.1\r\nHost: a\r\n" + CHUNKED + CHUNKED + b"\r\n0\r\n\r\n", 400),
        (b"POST / HTTP/1.0\r\nHost: a\r\n" + CHUNKED + b"\r\n0\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nHost: a\r\n" + CHUNKED + b"\r\n0x3\r\nabc\r\n0\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: a\r\nX: a\r\n folded\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: a\r\nX : a\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: a\nX: a\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: a\r\nX: a\0b\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", 400),
        (b"GET /a b HTTP/1.1\r\nHost: a\r\n\r\n", 400),
        (b"GET a HTTP/1.1\r\nHost: a\r\n\r\n", 400),
        (b"GET ftp://a/ HTTP/1.1\r\nHost: a\r\n\r\n", 400),
        (b"GET http://user@a/ HTTP/1.1\r\nHost: a\r\n\r\n", 400),
        (b"CONNECT a:1 HTTP/1.1\r\nHost: a\r\n\r\n", 405),
        (b"GET / HTTP/2.0\r\nHost: a\r\n\r\n", 505),
        (b"GET / HTTP/0.9\r\n\r\n", 505),
        (b"BREW / HTTP/1.1\r\nHost: a\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
        (b"GET / HTTP/1.1\r\nHost: a\r\n" + b"X: y\r\n" * 300 + b"\r\n", 431),
        (b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"y" * 70_000 + b"\r\n\r\n", 431),
        (b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"y" * 300_000, 431),
        (b"GET /" + b"y" * 300_000, 431),
        (
            b"POST / HTTP/1.1\r\nHost: a\r\nConnection: upgrade\r\nUpgrade: h2c\r\n"
            + LENGTH
            + b"\r\nabc",
            400,
        ),
        (
            b"POST / HTTP/1.0\r\nHost: a\r\nConnection: upgrade\r\nUpgrade: a\r\n"
            + LENGTH
            + b"\r\nabc",
            400,
        ),
    ],
)
async def test_request_is_refused_when_ambiguous_or_too_large(data: bytes, expected: int) -> None:
    """What two programs could read differently reaches no replica, and the connection ends."""
    replica = FakeReplica()
    async with installation(replica) as served:
        response = await served.send(data + GET)
        assert served.in_flight == 0
    assert status(response) == expected
    assert b"200 OK" not in response
    assert replica.heads == []


async def test_invalid_body_ends_request_at_replica() -> None:
    """An invalid chunk ends the request that it belongs to, and the replica's connection."""
    replica = FakeReplica()
    async with installation(replica) as served:
        response = await served.send(
            b"POST / HTTP/1.1\r\nHost: a\r\n" + CHUNKED + b"\r\n3\r\nabc\r\nzz\r\n\r\n" + GET
        )
    assert status(response) == 400
    assert replica.bodies == []
    assert OK[-2:] not in response


async def test_requests_before_an_invalid_one_are_answered() -> None:
    """An error does not lose the responses to what came before."""
    async with installation(FakeReplica()) as served:
        response = await served.send(GET + GET + b"nonsense\r\n\r\n")
    assert response.count(b"HTTP/1.1 200 OK") == 2


@pytest.mark.parametrize(
    ("data", "field"),
    [
        (b"GET / HTTP/1.0\r\n\r\n", b"Connection: close"),
        (b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n", b"Connection: close"),
    ],
)
async def test_connection_ends_when_the_client_says_so(data: bytes, field: bytes) -> None:
    """A client that keeps no connection gets its response, and the end."""
    async with installation(FakeReplica()) as served:
        response = await served.send(data)
    assert field in response
    assert response.endswith(b"\r\n\r\nok")


async def test_connection_stays_when_http10_client_asks() -> None:
    """HTTP/1.0 has connections that stay, too."""
    async with installation(FakeReplica()) as served, served.client() as client:
        for _ in range(2):
            response = await client.request(b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
            assert b"Connection: keep-alive" in response


async def test_request_waits_while_another_users_program_has_the_replicas_port() -> None:
    """Connections are opened and closed, nothing is sent; a replica of the right user gets the request."""
    replica = FakeReplica()
    async with installation(replica) as served, served.client() as client:
        own, dispatcher = (
            msgspec.structs.replace(replica.entry(), uid=os.geteuid()),
            served.dispatcher,
        )
        dispatcher.update(table(version("v1", msgspec.structs.replace(own, uid=os.geteuid() + 1))))
        await client.send(GET)
        while dispatcher.statistics.unreachable < 2:
            await asyncio.sleep(0)
        assert (replica.connections > 0, replica.heads) == (True, [])
        dispatcher.update(table(version("v1", own)))
        assert await client.response() == OK
    assert len(replica.heads) == 1
