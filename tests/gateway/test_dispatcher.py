"""Where requests wait, where they are sent again, and how replicas come and go under them."""

import asyncio
import contextlib
import socket

import pytest

from fenka.gateway.client_registry import ClientTimeouts
from fenka.gateway.dispatcher import BufferLimits, ReplicaTimeouts
from fenka.gateway.server import GatewayLimits
from tests.gateway.harness import (
    GET,
    LOOPBACK,
    OK,
    FakeReplica,
    Installation,
    installation,
    table,
    version,
)
from tests.waiting import until

POST = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\n\r\nabc"


class HeldReplica(FakeReplica):
    """A replica that answers when it may."""

    def __init__(self) -> None:
        super().__init__(handler=self._hold)
        self.may_answer = asyncio.Event()

    async def _hold(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await self.read(reader)
            await self.may_answer.wait()
            writer.write(self.response)


def start(served: Installation, *replicas: FakeReplica) -> None:
    """Make these all replicas of the service."""
    served.dispatcher.update(table(version("v1", *(replica.entry() for replica in replicas))))


async def waiting(served: Installation, count: int) -> None:
    """Wait until so many requests are buffered."""
    await until(lambda: len(served.dispatcher.buffer) == count)


async def test_request_waits_until_a_replica_is_ready() -> None:
    """The first request of a service without replicas is answered by the one that starts."""
    replica = FakeReplica()
    async with replica.serve(), installation() as served, served.client() as client:
        await client.send(POST)
        await waiting(served, 1)
        start(served, replica)
        assert await client.response() == OK
    assert replica.bodies == [b"abc"]


async def test_request_waits_until_the_replica_accepts_connections() -> None:
    """A replica that is in the table before it listens is tried until it does."""
    replica = FakeReplica()
    with socket.create_server((LOOPBACK, 0)) as reserved:
        replica.port = reserved.getsockname()[1]
    async with installation() as served, served.client() as client:
        start(served, replica)
        await client.send(GET)
        await waiting(served, 1)
        async with replica.serve(replica.port):
            assert await client.response() == OK
        assert served.dispatcher.statistics.unreachable >= 1


async def test_body_arrives_complete_when_sent_before_a_replica_is_ready() -> None:
    """A body that exceeds what is buffered waits at the client."""
    replica = FakeReplica()
    body = bytes(range(256)) * 40_000
    async with replica.serve(), installation() as served, served.client() as client:
        request = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(body)
        sending = asyncio.create_task(client.send(request + body))
        await waiting(served, 1)
        await until(lambda: served.connection.paused)
        assert served.dispatcher.buffer.total_bytes < 1_000_000
        start(served, replica)
        await sending
        assert await client.response() == OK
    assert replica.bodies == [body]


@pytest.mark.parametrize(
    "buffer", [BufferLimits(requests=1), BufferLimits(total_bytes=len(GET) + 60)]
)
async def test_request_is_refused_when_buffer_is_full(buffer: BufferLimits) -> None:
    """One more than the buffer holds gets 503 at once, and its connection stays."""
    replica = FakeReplica()
    limits = GatewayLimits(buffer=buffer)
    async with (
        replica.serve(),
        installation(limits=limits) as served,
        served.client() as first,
        served.client() as second,
    ):
        await first.send(GET)
        await waiting(served, 1)
        response = await second.request()
        assert response.startswith(b"HTTP/1.1 503 ")
        assert b"too many requests wait" in response
        assert b"Retry-After: " in response
        start(served, replica)
        assert await first.response() == OK
        assert await second.request() == OK


async def test_growing_request_is_refused_when_buffer_is_full() -> None:
    """The limit of bytes holds for bodies, too."""
    limits = GatewayLimits(buffer=BufferLimits(total_bytes=1000))
    async with installation(limits=limits) as served, served.client() as client:
        await client.send(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 5000\r\n\r\n")
        await waiting(served, 1)
        await client.send(bytes(2000))
        assert (await client.head()).startswith(b"HTTP/1.1 503 ")
        assert len(served.dispatcher.buffer) == served.dispatcher.buffer.total_bytes == 0


async def test_request_is_refused_when_no_replica_comes_in_time() -> None:
    """A request does not wait for longer than the limit."""
    limits = GatewayLimits(buffer=BufferLimits(wait_s=0.01))
    async with installation(limits=limits) as served, served.client() as client:
        assert b"no replica was ready within 0.01 s" in await client.request()
        assert len(served.dispatcher.buffer) == 0


async def test_request_leaves_the_buffer_when_client_hangs_up() -> None:
    """Nothing is sent for a client that has gone."""
    replica = FakeReplica()
    async with replica.serve(), installation() as served:
        async with served.client() as client:
            await client.send(GET)
            await waiting(served, 1)
        await waiting(served, 0)
        start(served, replica)
        async with served.client() as client:
            await client.request()
    assert len(replica.heads) == 1


@pytest.mark.parametrize("request_bytes", [GET, POST])
async def test_another_replica_is_selected_when_one_refuses_connections(
    request_bytes: bytes,
) -> None:
    """No request is lost to a replica that does not listen: nothing was sent to it."""
    replica, dead = FakeReplica(), FakeReplica()
    async with dead.serve():
        pass
    async with installation(replica) as served:
        start(served, dead, replica)
        for _ in range(4):
            async with served.client() as client:
                assert await client.request(request_bytes) == OK
    assert len(replica.heads) == 4


class DroppingReplica(FakeReplica):
    """A replica that answers the first request of each connection, and closes at the second.

    Attributes:
        part: what it sends before it closes.
    """

    def __init__(self, part: bytes = b"") -> None:
        super().__init__(handler=self._drop)
        self.part = part

    async def _drop(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self.read(reader)
        writer.write(OK)
        await self.read(reader)
        writer.write(self.part)


async def test_idempotent_request_is_sent_again_when_idle_connection_ends() -> None:
    """A request that met the end of an idle connection is answered over another."""
    replica = DroppingReplica()
    async with installation(replica) as served, served.client() as client:
        for _ in range(3):
            assert await client.request() == OK
        assert served.dispatcher.statistics.retries == 2


@pytest.mark.parametrize(
    ("request_bytes", "part"),
    [
        (POST, b""),
        (b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\n\r\n", b""),
        (POST.replace(b"POST", b"PUT"), b""),
        (GET, b"HTTP/1.1 200"),
    ],
)
async def test_request_is_sent_once_when_a_replica_may_have_begun(
    request_bytes: bytes, part: bytes
) -> None:
    """A request with an effect, a body that is gone, or the begin of a response is not sent again."""
    replica = DroppingReplica(part)
    async with installation(replica) as served, served.client() as client:
        assert await client.request(request_bytes) == OK
        assert (await client.request(request_bytes)).startswith(b"HTTP/1.1 502 ")
        assert served.dispatcher.statistics.retries == 0
    assert len(replica.heads) == 2


async def test_idempotent_request_is_sent_once_when_new_connection_ends() -> None:
    """A replica that crashes by a request is not given it again, nor are the others."""

    async def crash(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await replica.read(reader)

    replica = FakeReplica(handler=crash)
    async with installation(replica) as served, served.client() as client:
        assert (await client.request()).startswith(b"HTTP/1.1 502 ")
    assert len(replica.heads) == 1


async def test_terminating_replica_finishes_its_request_and_gets_no_other() -> None:
    """A replica that ends answers what it has, and its connection is closed afterwards."""
    old, new = HeldReplica(), FakeReplica(OK.replace(b"ok", b"hi"))
    async with installation(old) as served, new.serve(), served.client() as first:
        await first.send(GET)
        await until(lambda: old.heads)
        entries = old.entry(terminating=True), new.entry()
        served.dispatcher.update(table(version("v1", *entries)))
        async with served.client() as second:
            for _ in range(3):
                assert (await second.request()).endswith(b"hi")
        old.may_answer.set()
        assert await first.response() == OK
        await until(lambda: old.ended)
        assert (await first.request()).endswith(b"hi")
    assert len(old.heads) == 1


async def test_replica_finishes_its_request_when_it_leaves_the_table() -> None:
    """A table without a replica does not end what the replica does."""
    old = HeldReplica()
    async with installation(old) as served, served.client() as client:
        await client.send(GET)
        await until(lambda: old.heads)
        start(served)
        old.may_answer.set()
        assert await client.response() == OK
        assert served.in_flight == 0


async def test_connections_are_closed_when_idle_replica_ends() -> None:
    """A replica that ends is not kept by idle connections."""
    replica = FakeReplica()
    async with installation(replica) as served, served.client() as client:
        await client.request()
        start(served)
        await until(lambda: replica.ended)


async def test_idle_connection_is_closed_after_its_time() -> None:
    """The gateway closes idle connections before servers do."""
    replica = FakeReplica()
    limits = GatewayLimits(replicas=ReplicaTimeouts(idle_s=0.01))
    async with installation(replica, limits=limits) as served, served.client() as client:
        await client.request()
        await until(lambda: replica.ended)
        assert await client.request() == OK


async def test_client_gets_timeout_when_replica_does_not_answer() -> None:
    """A replica that never answers does not hold its request for ever."""
    replica = HeldReplica()
    limits = GatewayLimits(replicas=ReplicaTimeouts(response_s=0.01))
    async with installation(replica, limits=limits) as served, served.client() as client:
        assert b"did not answer within 0.01 s" in await client.request()
        await until(lambda: not served.in_flight)


@pytest.mark.parametrize(
    ("timeouts", "data", "expected"),
    [
        (ClientTimeouts(head_s=0.01), b"GET / HTTP/1.1\r\nHo", b"HTTP/1.1 408 "),
        (ClientTimeouts(body_s=0.01), POST[:-1], b"HTTP/1.1 408 "),
        (ClientTimeouts(idle_s=0.01), b"", b""),
        (ClientTimeouts(idle_s=0.01), b"\r\n", b""),
    ],
)
async def test_slow_client_is_refused(
    timeouts: ClientTimeouts, data: bytes, expected: bytes
) -> None:
    """A client that sends no complete request in time loses its connection."""
    replica = FakeReplica()
    async with installation(replica, limits=GatewayLimits(clients=timeouts)) as served:
        assert (await served.send(data)).startswith(expected)
        await until(lambda: not served.gateway.clients.connections)
        assert served.in_flight == 0


async def test_client_that_does_not_read_loses_its_connection() -> None:
    """A replica is not held by a client that does not read."""
    replica = FakeReplica(
        b"HTTP/1.1 200 OK\r\nContent-Length: 50000000\r\n\r\n" + bytes(50_000_000)
    )
    limits = GatewayLimits(clients=ClientTimeouts(unread_s=0.01))
    async with installation(replica, limits=limits) as served, served.client() as client:
        await client.send(GET)
        await until(lambda: replica.heads)
        await until(lambda: not served.gateway.clients.connections)
        await until(lambda: not served.in_flight)


async def test_longest_idle_connection_ends_when_there_are_too_many() -> None:
    """Idle connections, however many, exclude no client."""
    limits = GatewayLimits(max_connections=3)
    async with (
        installation(FakeReplica(), limits=limits) as served,
        contextlib.AsyncExitStack() as stack,
    ):
        idle = [await stack.enter_async_context(served.client()) for _ in range(3)]
        async with served.client() as client:
            assert await client.request() == OK
        with contextlib.suppress(ConnectionError):
            assert await idle[0].rest() == b""


async def test_drained_gateway_finishes_requests_and_ends_connections() -> None:
    """A gateway that ends answers what it has, and idle connections end at once."""
    replica = HeldReplica()
    async with installation(replica) as served, served.client() as idle, served.client() as busy:
        await busy.send(GET)
        await until(lambda: replica.heads)
        await until(lambda: len(served.gateway.clients.connections) == 2)
        draining = asyncio.create_task(served.gateway.drain())
        assert await idle.rest() == b""
        replica.may_answer.set()
        assert b"Connection: close\r\n" in await busy.rest()
        await draining


async def test_shares_are_weights_under_concurrent_load() -> None:
    """Of 1,000 requests of 20 clients exactly a tenth go to the canary."""
    stable, canary = FakeReplica(), FakeReplica()
    async with stable.serve(), canary.serve(), installation() as served:
        versions = (
            version("v1", stable.entry(), weight=90),
            version("v2", canary.entry(), weight=10),
        )
        served.dispatcher.update(table(*versions))

        async def load() -> None:
            async with served.client() as client:
                for _ in range(50):
                    assert await client.request() == OK

        await asyncio.gather(*(load() for _ in range(20)))
    assert (len(stable.heads), len(canary.heads)) == (900, 100)
