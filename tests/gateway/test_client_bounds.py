"""What clients can take of a gateway: connections, memory, time and frames, while others are served."""

import asyncio
import contextlib
import errno
import logging
from collections.abc import AsyncIterator

import pytest
from hyperframe.frame import DataFrame, HeadersFrame, PriorityFrame

from fenka.gateway import client_registry, http2_client
from fenka.gateway.client_registry import BASE_BYTES, ClientTimeouts
from fenka.gateway.http1_client import FIELD_BYTES
from fenka.gateway.http2_client import Http2ClientConnection
from fenka.gateway.http2_connection import PREFACE, Half
from fenka.gateway.main import INTERVAL_S, LoopErrors
from fenka.gateway.server import GatewayLimits
from tests.gateway.harness import GET, LOOPBACK, OK, Client, FakeReplica, Installation, installation
from tests.waiting import until

PATIENT = ClientTimeouts(head_s=100, body_s=100)
SLOW_HEAD = b"GET / HTTP/1.1\r\nHost: a\r\nX: "
SLOW_BODY = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1000000\r\n\r\nx"
FILLER = b"x" * 50_000


@pytest.fixture(autouse=True)
def users_by_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have each address of 127.0.0.0/8 be a user of its own."""
    monkeypatch.setattr(client_registry, "client_uid", lambda client, _: client[0])


@contextlib.asynccontextmanager
async def client_from(served: Installation, address: str) -> AsyncIterator[Client]:
    """Connect a client of this address for the block."""
    streams = await asyncio.open_connection(LOOPBACK, served.port, local_addr=(address, 0))
    client = Client(*streams)
    try:
        yield client
    finally:
        client.close()


async def test_slow_heads_stay_within_the_budget_and_cost_nobody_else() -> None:
    """The client with the most bytes loses its oldest requests; another one's slow request goes on."""
    budget = 1 << 20
    limits = GatewayLimits(clients=PATIENT, client_bytes=budget)
    async with contextlib.AsyncExitStack() as stack:
        served = await stack.enter_async_context(installation(FakeReplica(), limits=limits))
        registry = served.gateway.clients
        other = await stack.enter_async_context(client_from(served, "127.0.0.3"))
        await other.send(GET[:-2])
        await until(lambda: registry.held_bytes > BASE_BYTES)
        greedy = []
        for _ in range(40):
            greedy.append(await stack.enter_async_context(client_from(served, "127.0.0.2")))
            with contextlib.suppress(ConnectionError):
                await greedy[-1].send(SLOW_HEAD + FILLER)
            assert registry.held_bytes <= budget
        await until(lambda: served.dispatcher.statistics.rejected["memory"] > 20)
        assert registry.held_bytes == sum(registry.connections.values()) <= budget
        with contextlib.suppress(ConnectionError):
            assert await greedy[0].rest() == b""
        await greedy[-1].send(b"\r\n\r\n")
        assert await greedy[-1].response() == OK
        await other.send(b"\r\n")
        assert await other.response() == OK
    await until(lambda: registry.held_bytes == 0)


async def test_bodies_and_unread_responses_count() -> None:
    """What waits for a replica, and what a client does not read, is memory."""
    replica = FakeReplica(
        b"HTTP/1.1 200 OK\r\nContent-Length: 50000000\r\n\r\n" + bytes(50_000_000)
    )
    async with installation(replica) as served:
        async with served.client() as client:
            await client.send(GET)
            await until(lambda: served.gateway.clients.held_bytes > BASE_BYTES + FIELD_BYTES)
        await until(lambda: not served.gateway.clients.connections)
    async with installation() as served, served.client() as client:
        await client.send(SLOW_BODY + FILLER)
        await until(lambda: served.gateway.clients.held_bytes > BASE_BYTES + len(FILLER))
        await until(lambda: served.connection.held_bytes < 2 * len(FILLER))


async def test_other_clients_are_served_when_one_has_all_connections() -> None:
    """The client with the most connections loses its newest, though none of them is idle."""
    limits = GatewayLimits(clients=PATIENT, max_connections=3)
    replica = FakeReplica()
    async with (
        installation(replica, limits=limits) as served,
        contextlib.AsyncExitStack() as stack,
    ):
        for _ in range(3):
            greedy = await stack.enter_async_context(client_from(served, "127.0.0.2"))
            await greedy.send(SLOW_BODY)
        await until(lambda: served.in_flight == 3)
        async with client_from(served, "127.0.0.3") as client:
            assert await client.request() == OK
        with contextlib.suppress(ConnectionError):
            assert await greedy.rest() == b""
        assert served.dispatcher.statistics.rejected["too_many_connections"] == 1


async def test_body_ends_when_it_is_slower_than_the_smallest_rate() -> None:
    """A byte now and then does not hold a replica's connection."""
    timeouts = ClientTimeouts(body_s=100, body_bytes_per_s=10**9, rate_grace_s=0.01)
    limits = GatewayLimits(clients=timeouts)
    async with installation(FakeReplica(), limits=limits) as served, served.client() as client:
        await client.send(SLOW_BODY)
        assert (await client.rest()).startswith(b"HTTP/1.1 408 ")
        await until(lambda: not served.in_flight)


async def test_head_with_too_many_fields_ends_before_it_is_complete() -> None:
    """Small fields take more memory than bytes."""
    async with installation(FakeReplica()) as served:
        response = await served.send(b"GET / HTTP/1.1\r\nHost: a\r\n" + b"a:\r\n" * 250)
    assert response.startswith(b"HTTP/1.1 431 ")
    assert b"more than 200 header fields" in response


# --- HTTP/2 ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "frame",
    [
        DataFrame(1, b"").serialize(),
        PriorityFrame(1, stream_weight=1).serialize(),
        b"\0\0\0\4\0\0\0\0\0",
    ],
)
async def test_connection_ends_when_frames_have_no_data(
    monkeypatch: pytest.MonkeyPatch, frame: bytes
) -> None:
    """Frames that flow control does not bound."""
    monkeypatch.setattr(http2_client, "MAX_EMPTY_FRAMES", 50)
    monkeypatch.setattr(http2_client, "REGAINED_PER_CHECK", 0)
    head = HeadersFrame(1, b"\x83\x86\x84\x41\x01a", flags=["END_HEADERS"]).serialize()
    settings = b"\0\0\0\4\0\0\0\0\0"
    async with installation() as served, served.client() as client:
        await client.send(PREFACE + settings + head)
        await until(lambda: len(served.dispatcher.buffer))
        with contextlib.suppress(ConnectionError):
            for _ in range(100):
                await client.send(frame)
        await until(lambda: not served.gateway.clients.connections)
        assert len(served.dispatcher.buffer) == 0


async def test_head_of_http2_that_does_not_end_is_bounded() -> None:
    """CONTINUATION frames, which h2 would keep."""
    head = HeadersFrame(1, b"\x83\x86\x84\x41\x01a").serialize()
    more = b"\0\x3f\xff\x09\0\0\0\0\1" + b"\0" * 0x3FFF
    async with installation() as served, served.client() as client:
        await client.send(PREFACE + b"\0\0\0\4\0\0\0\0\0" + head)
        await client.send(more)
        await until(lambda: served.gateway.clients.held_bytes > 2 * BASE_BYTES + len(more))
        with contextlib.suppress(ConnectionError):
            for _ in range(20):
                await client.send(more)
        await until(lambda: not served.gateway.clients.connections)


async def test_small_frames_are_kept_as_one_part() -> None:
    """65,000 frames of a byte take the memory of 65,000 bytes."""
    acknowledged = []

    class Source:
        def acknowledge(self, stream: int, size: int) -> None:
            acknowledged.append((stream, size))

    half = Half(Source(), 1, 0.0)  # type: ignore[arg-type]
    for _ in range(20_000):
        half.add(b"x", 1, 0.0)
    half.add(b"", 9, 0.0)
    assert half.held_bytes == 20_000
    assert len(half._chunks) == 2
    assert acknowledged == [(1, 9)]


# --- what the program logs ------------------------------------------------------------------------------


async def test_connections_that_cannot_be_accepted_are_one_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """asyncio reports each of them."""

    class Loop:
        now = 0.0

        def time(self) -> float:
            return self.now

    loop, report = Loop(), LoopErrors()
    context = {"exception": OSError(errno.EMFILE, "x"), "message": "socket.accept() out of …"}
    with caplog.at_level(logging.ERROR):
        for _ in range(1000):
            report(loop, context)  # type: ignore[arg-type]
        report(loop, {"exception": ValueError("a bug"), "message": "oh"})  # type: ignore[arg-type]
        loop.now = INTERVAL_S
        report(loop, context)  # type: ignore[arg-type]
    assert [record.getMessage() for record in caplog.records] == [
        "clients have to wait: no connection can be accepted: Too many open files",
        "oh (999 more errors were not logged)",
        "clients have to wait: no connection can be accepted: Too many open files",
    ]
    assert caplog.records[0].exc_info is None


async def test_http2_connection_counts_what_it_holds() -> None:
    """An idle one has state; requests that wait have heads."""
    async with installation() as served, served.client() as client:
        await client.send(PREFACE + b"\0\0\0\4\0\0\0\0\0")
        await until(
            lambda: any(
                isinstance(each, Http2ClientConnection)
                for each in served.gateway.clients.connections
            )
        )
        await until(lambda: served.gateway.clients.held_bytes > http2_client.STATE_BYTES)
