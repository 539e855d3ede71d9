"""What of requests reaches a replica: heads, bodies, and which requests are refused."""

import asyncio

import pytest

from tests.gateway.harness import (
    ANSWER,
    GET,
    OK,
    POST,
    FakeReplica,
    Installation,
    installation,
)
from tests.waiting import until

ADDED = b"x-forwarded-proto: http\r\nx-forwarded-for: 127.0.0.1\r\n\r\n"
"""The end of each head that a replica gets."""


async def test_request_reaches_replica_with_client_address() -> None:
    """A replica gets what the client sent, and the client's address after those of other proxies."""
    replica = FakeReplica()
    async with installation(replica) as served, served.client() as client:
        await client.request(
            b"GET /a//b/../%2e?b=c HTTP/1.1\r\nHost: service:80\r\n"
            b"X-Own: 1\r\nX-Own: 2\r\nUser-Agent: u\r\n\r\n"
        )
        await client.request(GET.replace(b"\r\n\r\n", b"\r\nX-Forwarded-For: 10.0.0.9\r\n\r\n"))
    assert replica.heads == [
        b"GET /a//b/../%2e?b=c HTTP/1.1\r\nhost: service:80\r\nx-own: 1\r\nx-own: 2\r\nuser-agent: u\r\n"
        + ADDED,
        b"GET / HTTP/1.1\r\nhost: service\r\nx-forwarded-for: 10.0.0.9,127.0.0.1\r\n"
        b"x-forwarded-proto: http\r\n\r\n",
    ]


CONTROLS = (
    b"X-Envoy-Retry-On: 5xx,reset\r\nX-Envoy-Max-Retries: 9\r\nX-Envoy-Upstream-Rq-Timeout-Ms: 1\r\n"
    b"X-Envoy-Upstream-Rq-Per-Try-Timeout-Ms: 1\r\nX-Envoy-Hedge-On-Per-Try-Timeout: true\r\n"
    b"X-Envoy-Original-Path: /b\r\nX-Envoy-Internal: true\r\nX-Envoy-External-Address: 10.0.0.1\r\n"
    b"X-Envoy-Decorator-Operation: x\r\nX-Envoy-Retriable-Status-Codes: 500\r\n"
)


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("forwarded", [b"", b"X-Forwarded-For: 10.0.0.9\r\n"])
async def test_clients_do_not_control_envoy(forwarded: bytes, waits: bool) -> None:
    """Fields by which Envoy's own services change timeouts and retries have no effect."""
    replica = FakeReplica(b"HTTP/1.1 500 Oh\r\nContent-Length: 0\r\n\r\n")
    async with replica.serve(), installation() as served, served.client() as client:
        if not waits:
            await served.start(replica)
        await client.send(POST.replace(b"\r\n\r\n", b"\r\n" + forwarded + CONTROLS + b"\r\n", 1))
        if waits:
            await served.waiting(1)
            await served.start(replica)
        assert (await client.answer())[0] == 500
    assert len(replica.heads) == 1
    assert b"x-envoy" not in replica.heads[0]


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


def echo() -> FakeReplica:
    """Return a replica that answers with the target of the request."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            target = (await replica.read(reader)).split(b" ")[1]
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(target), target))

    replica = FakeReplica(handler=handle)
    return replica


async def test_pipelined_requests_are_answered_in_order() -> None:
    """Requests that come at once are answered one after the other."""
    replica = echo()
    async with installation(replica) as served, served.client() as client:
        await client.send(
            b"GET /1 HTTP/1.1\r\nHost: a\r\n\r\n"
            b"POST /2 HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\n\r\nabc"
            b"GET /3 HTTP/1.1\r\nHost: a\r\n\r\n"
        )
        bodies = [(await client.answer())[1] for _ in range(3)]
    assert bodies == [b"/1", b"/2", b"/3"]
    assert replica.bodies == [b"", b"abc", b""]


async def test_pipelined_requests_are_sent_one_after_the_other() -> None:
    """A client that sends many requests at once has one at a replica."""
    replica = FakeReplica()
    async with installation(replica) as served, served.client() as client:
        await client.send(GET * 300)
        for _ in range(300):
            assert await client.answer() == ANSWER
    assert replica.connections == 1


@pytest.mark.parametrize(
    ("fields", "passed"),
    [
        (b"Connection: keep-alive, X-Secret\r\nX-Secret: 1\r\nKeep-Alive: 5\r\n", b""),
        (b"Proxy-Connection: keep-alive\r\nTE: trailers, gzip\r\n", b"te: trailers\r\n"),
        (b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AA\r\n", b""),
    ],
)
async def test_fields_of_the_connection_stay_on_the_connection(
    fields: bytes, passed: bytes
) -> None:
    """Hop-by-hop fields, and those that Connection names, do not reach the replica."""
    replica = FakeReplica()
    async with installation(replica) as served, served.client() as client:
        await client.request(b"GET / HTTP/1.1\r\nHost: a\r\n" + fields + b"\r\n")
        await client.request()
    assert replica.heads[0] == b"GET / HTTP/1.1\r\nhost: a\r\n" + passed + ADDED


@pytest.mark.parametrize(
    ("target", "sent", "host"),
    [
        (b"http://other/p?q", b"/p?q", b"other"),
        (b"HTTP://other:81", b"/", b"other:81"),
    ],
)
async def test_target_is_sent_as_path(target: bytes, sent: bytes, host: bytes) -> None:
    """An absolute target becomes a path, and its host replaces the Host field."""
    replica = FakeReplica()
    async with installation(replica) as served, served.client() as client:
        await client.request(b"GET " + target + b" HTTP/1.1\r\nHost: a\r\n\r\n")
    assert replica.heads == [b"GET " + sent + b" HTTP/1.1\r\nhost: " + host + b"\r\n" + ADDED]


LENGTH = b"Content-Length: 3\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n"
HEAD_11 = b"POST / HTTP/1.1\r\nHost: a\r\n"
CLOSING = GET.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
REFUSED: list[tuple[bytes, int]] = [
    (HEAD_11 + LENGTH + CHUNKED + b"\r\n0\r\n\r\n", 400),
    (HEAD_11 + CHUNKED + LENGTH + b"\r\n0\r\n\r\n", 400),
    (HEAD_11 + LENGTH + b"Content-Length: 4\r\n\r\nabc", 400),
    (HEAD_11 + LENGTH + LENGTH + b"\r\nabc", 400),
    (HEAD_11 + b"Content-Length: 3, 3\r\n\r\nabc", 400),
    (HEAD_11 + b"Content-Length: +3\r\n\r\nabc", 400),
    (HEAD_11 + b"Content-Length: -3\r\n\r\nabc", 400),
    (HEAD_11 + b"Content-Length: 0x3\r\n\r\nabc", 400),
    (HEAD_11 + b"Content-Length: 99999999999999999999\r\n\r\nabc", 400),
    (HEAD_11 + b"Content-Length:\r\n\r\nabc", 400),
    (HEAD_11 + b"Transfer-Encoding: xchunked\r\n\r\n", 501),
    (HEAD_11 + b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n", 501),
    (HEAD_11 + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 501),
    (HEAD_11 + b"Transfer-Encoding:\x0bchunked\r\n\r\n0\r\n\r\n", 400),
    (HEAD_11 + b"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n", 400),
    (HEAD_11 + CHUNKED + CHUNKED + b"\r\n0\r\n\r\n", 501),
    (HEAD_11 + b"Connection: content-length, host\r\n" + LENGTH + b"\r\nabc", 400),
    (HEAD_11 + b"X : a\r\n\r\n", 400),
    (HEAD_11 + b"X: a\0b\r\n\r\n", 400),
    (HEAD_11 + b"X\r\n\r\n", 400),
    (HEAD_11 + b": a\r\n\r\n", 400),
    (b"GET / HTTP/1.1\r\n\r\n", 400),
    (b"GET /a b HTTP/1.1\r\nHost: a\r\n\r\n", 400),
    (b"GET a HTTP/1.1\r\nHost: a\r\n\r\n", 400),
    (b"GET ftp://a/ HTTP/1.1\r\nHost: a\r\n\r\n", 400),
    (b"CONNECT a:1 HTTP/1.1\r\nHost: a\r\n\r\n", 404),
    (b"BREW / HTTP/1.1\r\nHost: a\r\n\r\n", 400),
    (b"PRI * HTTP/1.1\r\nHost: a\r\n\r\n", 400),
    (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
    (b"GET / HTTP/1.1\r\nHost: a\r\n" + b"X: y\r\n" * 300 + b"\r\n", 431),
    (b"GET / HTTP/1.1\r\nHost: a\r\n" + b"a:\r\n" * 250 + b"\r\n", 431),
    (b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"y" * 70_000 + b"\r\n\r\n", 431),
    (b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"y" * 300_000, 431),
    (b"GET /" + b"y" * 300_000, 431),
    (HEAD_11 + b"Connection: upgrade\r\nUpgrade: a\r\n" + LENGTH + b"\r\nabc", 403),
]
"""Requests that two programs could read differently, or that are too large."""


async def test_request_is_refused_when_ambiguous_or_too_large() -> None:
    """It reaches no replica, and neither does what follows it on its connection."""
    replica = FakeReplica()
    async with installation(replica) as served:
        # At once, since Envoy waits for a second until it ends a connection that it has refused.
        responses = await asyncio.gather(*(served.send(data + CLOSING) for data, _ in REFUSED))
        seen = [
            (data, int(response.split(b" ", 2)[1]), OK[-2:] in response)
            for (data, _), response in zip(REFUSED, responses, strict=True)
        ]
        await served.until_metric("requests", 0)
        assert await served.metric("rejected_total", reason="invalid_request") >= 10
    assert seen == [(data, expected, False) for data, expected in REFUSED]
    assert replica.heads == []


GET_A = b"GET / HTTP/1.1\r\nHost: a\r\n"
NORMALIZED: list[tuple[bytes, bytes, bytes]] = [
    (GET_A + b"X: a\r\n folded\r\n\r\n", b"GET / HTTP/1.1\r\nhost: a\r\nx: a folded\r\n", b""),
    (b"GET / HTTP/1.1\r\nHost: a\nX: a\r\n\r\n", b"GET / HTTP/1.1\r\nhost: a\r\nx: a\r\n", b""),
    (GET_A + b"X: a\rb\r\n\r\n", b"GET / HTTP/1.1\r\nhost: a\r\nx: ab\r\n", b""),
    (
        GET_A + b"Content-Length: 0\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: a\r\ncontent-length: 0\r\n",
        b"",
    ),
    (
        HEAD_11 + b"Connection: upgrade\r\nUpgrade: h2c\r\n" + LENGTH + b"\r\nabc",
        b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 3\r\n",
        b"abc",
    ),
]
"""Requests that are sent in one reading only: what came, the head that a replica gets, and the body."""


async def test_asterisk_is_no_target() -> None:
    """It concerns a server, of which a service has several."""
    async with installation(FakeReplica()) as served, served.client() as client:
        assert (await client.fetch(b"OPTIONS * HTTP/1.1\r\nHost: a\r\n\r\n"))[0] == 404
        assert await client.fetch() == ANSWER


async def test_unusual_request_is_sent_in_one_reading() -> None:
    """Replicas get no unusual syntax, and exactly as many requests as the client is answered."""
    replica = FakeReplica()
    async with installation(replica) as served, served.client() as client:
        for data, _, _ in NORMALIZED:
            await client.send(data + GET)
            assert [await client.answer(), await client.answer()] == [ANSWER] * 2
    assert replica.heads[::2] == [head + ADDED for _, head, _ in NORMALIZED]
    assert replica.bodies[::2] == [body for _, _, body in NORMALIZED]
    assert {head.split(b"\r\n")[0] for head in replica.heads[1::2]} == {b"GET / HTTP/1.1"}


@pytest.mark.parametrize(
    "data",
    [
        GET_A + b"Host: b\r\n\r\n",
        b"GET http://user@a/ HTTP/1.1\r\nHost: a\r\n\r\n",
        b"POST / HTTP/1.0\r\nHost: a\r\n" + CHUNKED + b"\r\n0\r\n\r\n",
        b"GET / HTTP/2.0\r\nHost: a\r\n\r\n",
        b"GET / HTTP/0.9\r\n\r\n",
    ],
)
async def test_strange_request_is_one_request(data: bytes) -> None:
    """Whether it is refused or not, a replica gets one request of HTTP/1.1 with one Host field."""
    replica = FakeReplica()
    async with installation(replica) as served, served.client() as client:
        await client.send(data)
        status, _ = await client.answer()
    assert status == (200 if replica.heads else 400)
    for head in replica.heads:
        assert head.split(b"\r\n")[0].endswith(b" HTTP/1.1")
        assert head.count(b"\r\nhost: ") == 1
    assert len(replica.heads) <= 1


@pytest.mark.parametrize(
    "chunk", [b"zz\r\n\r\n", b"0x3\r\nabc\r\n", b"3 \r\nabc\r\n", b"-1\r\n", b"f" * 17 + b"\r\n"]
)
async def test_invalid_body_ends_request_at_replica(chunk: bytes) -> None:
    """An invalid chunk ends the request that it belongs to, and the replica's connection."""
    replica = FakeReplica()
    async with installation(replica) as served:
        response = await served.send(HEAD_11 + CHUNKED + b"\r\n3\r\nabc\r\n" + chunk + GET)
        await until(lambda: replica.ended == replica.connections)
        await served.until_metric("requests", 0)
    assert response.startswith(b"HTTP/1.1 400 ")
    assert replica.bodies == []
    assert b" 200 " not in response


async def test_requests_before_an_invalid_one_are_answered() -> None:
    """An error does not lose the responses to what came before."""
    async with installation(FakeReplica()) as served:
        response = await served.send(GET + GET + b"nonsense\r\n\r\n")
    assert response.count(b"HTTP/1.1 200 OK") == 2
    assert b"HTTP/1.1 400 " in response


@pytest.mark.parametrize(
    "data", [b"GET / HTTP/1.0\r\n\r\n", GET.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")]
)
async def test_connection_ends_when_the_client_says_so(data: bytes) -> None:
    """A client that keeps no connection gets its response, and the end."""
    replica = FakeReplica()
    async with installation(replica) as served:
        response = await served.send(data)
        assert b"\r\nconnection: close\r\n" in response
        assert response.endswith(b"\r\n\r\nok")
        # The replica's connection is not the client's.
        assert (await served.send(data)).endswith(b"\r\n\r\nok")
    assert replica.connections == 1


async def test_connection_stays_when_http10_client_asks() -> None:
    """HTTP/1.0 has connections that stay, too."""
    async with installation(FakeReplica()) as served, served.client() as client:
        for _ in range(2):
            response = await client.request(b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
            assert b"\r\nconnection: keep-alive\r\n" in response


# --- others meanwhile -----------------------------------------------------------------------------------


async def open_many(served: Installation, count: int, data: bytes) -> list[asyncio.StreamWriter]:
    """Open connections that send these bytes and no more."""
    writers = list[asyncio.StreamWriter]()
    for _ in range(count):
        _, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(data)
        writers.append(writer)
    return writers


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"x" * 50_000,
        b"POST /slow HTTP/1.1\r\nHost: a\r\nContent-Length: 1000000\r\n\r\n" + b"x" * 50_000,
        b"",
    ],
)
async def test_others_are_answered_beside_slow_requests(data: bytes) -> None:
    """600 slow heads, bodies or idle connections: another client gets all its answers."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            if b"/slow" in head:
                await reader.read()
            writer.write(OK)

    replica = FakeReplica(handler=handle)
    async with installation(replica) as served:
        writers = await open_many(served, 600, data)
        await served.until_metric("connections", 600)
        async with served.client() as client:
            for _ in range(20):
                assert await client.fetch() == ANSWER
        assert await served.envoy_memory_kib() < 320 * 1024
        for writer in writers:
            writer.close()
        await served.until_metric("connections", 0)


async def test_others_are_answered_beside_slow_bodies_that_wait() -> None:
    """600 slow bodies without a replica, and then one with."""
    replica = FakeReplica()
    slow = b"POST /slow HTTP/1.1\r\nHost: a\r\nContent-Length: 1000000\r\n\r\n" + b"x" * 100_000
    async with replica.serve(), installation() as served:
        writers = await open_many(served, 600, slow)
        await served.waiting(600)
        assert await served.envoy_memory_kib() < 320 * 1024
        await served.start(replica)
        async with served.client() as client:
            for _ in range(20):
                assert await client.fetch() == ANSWER
        for writer in writers:
            writer.close()
        await served.until_metric("requests", 0)
