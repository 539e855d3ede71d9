"""Where requests wait, and where they are sent again."""

import asyncio
import select
import socket
from pathlib import Path

import pytest

from tests.gateway.harness import (
    ANSWER,
    GET,
    OK,
    POST,
    FakeReplica,
    HeldReplica,
    installation,
)
from tests.gateway.tables import LOOPBACK
from tests.waiting import until, wait_until

PUT = POST.replace(b"POST", b"PUT")
EMPTY_POST = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\n\r\n"


def dead_replica() -> FakeReplica:
    """Return a replica at a port where nothing listens."""
    replica = FakeReplica()
    with socket.create_server((LOOPBACK, 0)) as reserved:
        replica.port = reserved.getsockname()[1]
    return replica


async def test_request_waits_until_a_replica_is_ready() -> None:
    """The first request of a service without replicas is answered by the one that starts, and sent once."""
    replica = FakeReplica()
    async with replica.serve(), installation() as served, served.client() as client:
        await client.send(POST)
        await served.waiting(1)
        assert await served.metric("requests") == await served.metric("requests_waiting") == 1
        await served.start(replica)
        assert await client.answer() == ANSWER
        await served.until_metric("requests", 0)
        assert await served.metric("buffered_total") == 1
        assert await served.metric("responses_total", version="v1", status="200") == 1
    assert replica.bodies == [b"abc"]


async def test_request_waits_before_the_first_table() -> None:
    """A gateway that does not know its replicas yet keeps what comes."""
    replica = FakeReplica()
    async with replica.serve(), installation() as served, served.client() as client:
        served.gateway.update(None)
        assert served.gateway.problem == "the replicas are not known yet"
        await client.send(GET)
        await served.waiting(1)
        await served.start(replica)
        assert await client.answer() == ANSWER
        assert not served.gateway.problem


async def test_requests_that_wait_are_sent_as_they_came() -> None:
    """What a replica gets does not tell whether the request has waited."""
    replica = FakeReplica()
    request = (
        b"GET /a?b=%2F HTTP/1.1\r\nHost: service\r\nX-Forwarded-For: 10.0.0.9\r\nX-Own: 1\r\n\r\n"
    )
    async with replica.serve(), installation() as served, served.client() as client:
        await client.send(request)
        await served.waiting(1)
        await served.start(replica)
        await client.response()
        await client.request(request)
    waited, other = replica.heads
    assert waited == other


async def test_request_waits_until_the_replica_accepts_connections() -> None:
    """A replica that is in the table before it listens is tried until it does."""
    replica = dead_replica()
    async with installation() as served, served.client() as client:
        await served.start(replica)
        await client.send(POST)
        await served.waiting(1)
        await served.until_metric("replicas", 1, version="v1", state="unreachable")
        async with replica.serve(replica.port):
            assert await client.answer() == ANSWER
            await served.until_metric("replicas", 1, version="v1", state="ready")
    assert replica.bodies == [b"abc"]


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("size", [100_000, 10_000_000])
async def test_body_arrives_complete_when_sent_before_a_replica_is_ready(
    size: int, chunked: bool
) -> None:
    """A body that exceeds what is kept of it waits at the client."""
    replica = FakeReplica()
    body = bytes(range(250)) * (size // 250)
    framing, data = b"Content-Length: %d\r\n" % size, body
    if chunked:
        framing = b"Transfer-Encoding: chunked\r\n"
        data = b"%x\r\n%s\r\n0\r\n\r\n" % (size, body)
    async with replica.serve(), installation() as served, served.client() as client:
        memory = await served.envoy_memory_kib()
        sending = asyncio.create_task(
            client.send(b"POST / HTTP/1.1\r\nHost: a\r\n" + framing + b"\r\n" + data)
        )
        await served.waiting(1)
        assert await served.envoy_memory_kib() - memory < 8_000
        await served.start(replica)
        await sending
        assert await client.answer() == ANSWER
    assert replica.bodies == [body]


async def test_request_is_refused_when_too_many_wait() -> None:
    """One more gets 503 at once, and its connection stays."""
    replica = FakeReplica()
    async with (
        replica.serve(),
        installation(buffer=1) as served,
        served.client() as first,
        served.client() as second,
    ):
        await first.send(GET)
        await served.waiting(1)
        response = await second.request()
        assert response.startswith(b"HTTP/1.1 503 ")
        assert response.endswith(b"\r\n\r\ntoo many requests wait for a replica\n")
        assert await served.metric("rejected_total", reason="buffer_full") == 1
        await served.start(replica)
        assert await first.answer() == ANSWER
        assert await second.fetch() == ANSWER


async def test_no_request_waits_when_none_may() -> None:
    """A buffer of 0."""
    async with installation(buffer=0) as served, served.client() as client:
        assert (await client.request()).startswith(b"HTTP/1.1 503 ")


async def test_request_is_refused_when_no_replica_comes_in_time() -> None:
    """A request does not wait for longer than the limit, also with a body."""
    async with installation(wait=0.01) as served, served.client() as client:
        for request in (GET, POST):
            response = await client.request(request)
            assert response.startswith(b"HTTP/1.1 503 ")
            assert response.endswith(b"\r\n\r\nno replica was ready within 0.01 s\n")
        assert len(served.gateway.held) == 0
        assert await served.metric("rejected_total", reason="buffer_timeout") == 2


async def test_request_is_refused_when_no_replica_accepts_connections_in_time() -> None:
    """The limit counts from the first attempt, although a replica that refused is tried again after 1 s."""
    async with installation(wait=2.5) as served, served.client() as client:
        await served.start(dead_replica())
        assert (await client.request()).endswith(b"no replica was ready within 2.5 s\n")
        assert served.gateway.held.held == 1


async def test_request_leaves_when_client_hangs_up() -> None:
    """Nothing is sent for a client that has gone."""
    replica = FakeReplica()
    async with replica.serve(), installation() as served:
        async with served.client() as client:
            await client.send(POST)
            await served.waiting(1)
        await served.waiting(0)
        await served.until_metric("abandoned_total", 1)
        await served.start(replica)
        async with served.client() as client:
            await client.request()
    assert len(replica.heads) == 1


async def test_request_that_has_waited_fails_when_its_replica_does() -> None:
    """After its wait a request is as any other: what a replica may have begun is not sent again."""
    replica = closing_replica()
    async with replica.serve(), installation() as served, served.client() as client:
        await client.send(POST)
        await served.waiting(1)
        await served.start(replica)
        assert (await client.response()).startswith(b"HTTP/1.1 502 ")
        assert len(served.gateway.held) == 0
    assert len(replica.heads) == 1


@pytest.mark.parametrize("request_bytes", [GET, POST])
async def test_another_replica_is_selected_when_one_refuses_connections(
    request_bytes: bytes,
) -> None:
    """No request is lost to a replica that does not listen: nothing was sent to it."""
    replica = FakeReplica()
    async with installation(replica) as served:
        await served.start(dead_replica(), replica, dead_replica())
        for _ in range(8):
            async with served.client() as client:
                assert await client.fetch(request_bytes) == ANSWER
    assert len(replica.heads) == 8


def stale_socket(path: str) -> list[socket.socket]:
    """Leave the file of a program that was killed."""
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(path)
        left.listen()
    return []


def full_socket(path: str) -> list[socket.socket]:
    """Return a socket whose program accepts nothing, and what fills its queue."""
    program = socket.socket(socket.AF_UNIX)
    program.bind(path)
    program.listen(0)
    sockets = [program]
    while True:
        sockets.append(socket.socket(socket.AF_UNIX))
        sockets[-1].setblocking(False)
        try:
            sockets[-1].connect(path)
        except BlockingIOError:
            return sockets


@pytest.mark.parametrize("prepare", [stale_socket, full_socket])
async def test_another_replica_is_selected_when_a_socket_accepts_nothing(
    tmp_path: Path, prepare: object
) -> None:
    """Also when the kernel would let a client wait: nothing was sent there."""
    assert callable(prepare)
    replica, dead = FakeReplica(), FakeReplica()
    dead.path = str(tmp_path / "dead")
    sockets = prepare(dead.path)
    async with replica.serve(path=str(tmp_path / "s")), installation() as served:
        await served.start(dead, replica)
        for _ in range(4):
            async with served.client() as client:
                assert await client.fetch(POST) == ANSWER
    assert len(replica.heads) == 4
    for opened in sockets:
        opened.close()


# --- what a replica may have begun ----------------------------------------------------------------------


class DroppingReplica(FakeReplica):
    """A replica that answers the first request of each connection, and closes at the second.

    Attributes:
        part: What it sends before it closes.
    """

    def __init__(self, part: bytes = b"") -> None:
        super().__init__(handler=self._drop)
        self.part = part

    async def _drop(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self.read(reader)
        writer.write(OK)
        await self.read(reader)
        writer.write(self.part)


def closing_replica() -> FakeReplica:
    """Return a replica that reads a request and closes."""

    async def close(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await replica.read(reader)

    replica = FakeReplica(handler=close)
    return replica


async def test_safe_request_is_sent_again_when_idle_connection_ends() -> None:
    """A request that met the end of an idle connection is answered over another."""
    replica = DroppingReplica()
    async with installation(replica) as served, served.client() as client:
        for _ in range(3):
            assert await client.fetch() == ANSWER
        assert await served.metric("retries_total") == 2


@pytest.mark.parametrize(
    ("request_bytes", "part"),
    [(POST, b""), (EMPTY_POST, b""), (POST, b"HTTP/1.1 200 OK\r\nX: ")],
)
async def test_request_is_sent_once_when_a_replica_may_have_begun(
    request_bytes: bytes, part: bytes
) -> None:
    """A request with an effect is not sent again."""
    replica = DroppingReplica(part)
    async with installation(replica) as served, served.client() as client:
        assert await client.fetch(request_bytes) == ANSWER
        status = (await client.request(request_bytes)).split()[1]
        assert status == b"502"
        assert await served.metric("rejected_total", reason="replica_failed") == 1
    assert len(replica.heads) == 2


async def test_unsafe_request_is_sent_once_when_new_connection_ends() -> None:
    """A replica that crashes by a request is not given it again, nor are the others."""
    replicas = [closing_replica() for _ in range(3)]
    async with installation(*replicas) as served, served.client() as client:
        status = (await client.request(POST)).split()[1]
        assert status == b"502"
    assert sum(len(replica.heads) for replica in replicas) == 1


async def test_request_that_crashes_replicas_ends() -> None:
    """A safe request is not sent without end, and does not wait."""
    replicas = [closing_replica() for _ in range(3)]
    async with installation(*replicas) as served, served.client() as client:
        assert (await client.request()).split()[1] == b"502"
        assert not served.gateway.held
    assert sum(len(replica.heads) for replica in replicas) <= 5


async def test_response_after_the_crash_of_a_replica_is_of_another() -> None:
    """A safe request survives a replica that ends."""
    replica, crashing = FakeReplica(), closing_replica()
    async with installation(replica, crashing) as served:
        for _ in range(6):
            async with served.client() as client:
                assert await client.fetch() == ANSWER


# --- time and idle connections --------------------------------------------------------------------------


async def test_idle_connections_to_replicas_end_before_servers_end_them() -> None:
    """A request would be lost that meets the end."""
    replica = FakeReplica()
    async with installation(replica) as served, served.client() as client:
        await client.request()
        await until(lambda: replica.ended)
        assert await client.fetch() == ANSWER


async def test_client_gets_timeout_when_replica_does_not_answer() -> None:
    """A replica that never answers does not hold its request, and the request is not sent again."""
    replica = HeldReplica()
    async with installation(replica, wait=0.05, response_timeout=0.05) as served:
        async with served.client() as client:
            for request in (GET, POST):
                assert (await client.request(request)).startswith(b"HTTP/1.1 504 ")
        await served.until_metric("requests", 0)
        assert await served.metric("rejected_total", reason="replica_timeout") == 2
    assert len(replica.heads) == 2


def _handed_over() -> int:
    """Return how many of Envoy's connections to the program that holds requests there are."""
    return sum(line.endswith("/held") for line in Path("/proc/net/unix").read_text().splitlines())


async def test_requests_wait_when_the_program_that_holds_them_is_busy() -> None:
    """Envoy hands them over faster than the program accepts them, and none is refused for that."""
    async with installation() as served:
        await served.until_metric("requests", 0)
        before = _handed_over()
        clients = [socket.create_connection((LOOPBACK, served.port)) for _ in range(600)]
        for client in clients:
            client.sendall(GET)
        # This waits without the event loop, so the program accepts nothing meanwhile.
        wait_until(lambda: _handed_over() - before >= 600 or select.select(clients, [], [], 0)[0])
        refused, _, _ = select.select(clients, [], [], 0)
        assert refused == []
        await served.waiting(600)
        for client in clients:
            client.close()
