"""Requests over kept connections, against servers that a test writes byte by byte."""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from fenka.kubernetes import connections
from fenka.kubernetes.connections import Answer, Connections, Limits, parse_answer
from tests.waiting import until

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
OK = b"HTTP/1.1 201 Created\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
LIMITS = Limits(30.0, 30.0)


class Clock:
    """A time that a test sets."""

    now = 0.0

    def __call__(self) -> float:
        """Return it."""
        return self.now


@contextlib.asynccontextmanager
async def serving(serve: Serve, clock: Clock | None = None) -> AsyncIterator[Connections]:
    """Yield connections to a server that handles each with this function."""
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    client = Connections(
        f"http://127.0.0.1:{port}", ssl.create_default_context(), clock=clock or Clock()
    )
    try:
        yield client
    finally:
        client.close()
        server.close()
        await server.wait_closed()


async def post(client: Connections, path: str = "/x", limits: Limits = LIMITS) -> Answer:
    """Send a request."""
    return await client.send("POST", path, {"Accept": "a"}, b"{}", limits)


async def read_request(reader: asyncio.StreamReader) -> bytes:
    """Return the head of a request, after its body of two bytes."""
    head = await reader.readuntil(b"\r\n\r\n")
    await reader.readexactly(2)
    return head


class Server:
    """Answers every request. Attributes: heads: those of the requests, by connection."""

    def __init__(self, answer: bytes = OK, after: bytes = b"", close: bool = False) -> None:
        self.heads: list[list[bytes]] = []
        self._answer, self._after, self._close = answer, after, close

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection."""
        heads: list[bytes] = []
        self.heads.append(heads)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while not (self._close and heads):
                heads.append(await read_request(reader))
                writer.write(self._answer + self._after)
        writer.close()


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (OK, Answer(201, b"{}", True)),
        (b"HTTP/1.1 100 Continue\r\n\r\n" + OK, Answer(201, b"{}", True)),
        (b"HTTP/1.1 204 No Content\r\n\r\n", Answer(204, b"", True)),
        (b"HTTP/1.1 204\r\n\r\n", Answer(204, b"", True)),
        (
            b"HTTP/1.1 409 C\r\nCONTENT-LENGTH:1\r\nConnection: close\r\n\r\nx",
            Answer(409, b"x", False),
        ),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 1\r\n\r\nx", Answer(200, b"x", False)),
        (
            CHUNKED + b"3\r\nabc\r\nA;x=1\r\n0123456789\r\n0\r\n\r\n",
            Answer(200, b"abc0123456789", True),
        ),
        (CHUNKED + b"1\r\na\r\n0\r\nDigest: b\r\nE: f\r\n\r\n", Answer(200, b"a", True)),
    ],
)
def test_answer_is_complete_when_its_last_byte_has_come(data: bytes, expected: Answer) -> None:
    """Whatever arrives together. What follows is another answer, which nobody has requested."""
    for end in range(len(data)):
        assert parse_answer(data[:end]) is None
    assert parse_answer(data) == expected
    assert parse_answer(data + b"H") == expected._replace(reusable=False)


def test_answer_without_length_ends_when_the_server_closes() -> None:
    """Its connection cannot be used again."""
    data = b"HTTP/1.1 502 Bad Gateway\r\nServer: proxy\r\n\r\nno upstream"
    assert parse_answer(data) is None
    assert parse_answer(data, ended=True) == Answer(502, b"no upstream", False)


async def test_connection_is_used_again_when_its_answer_is_read() -> None:
    """Requests one after another share it; concurrent ones do not."""
    server = Server()
    async with serving(server) as client:
        assert [await post(client) for _ in range(3)] == [Answer(201, b"{}", True)] * 3
        assert [len(heads) for heads in server.heads] == [3]
        await asyncio.gather(post(client), post(client))
        assert [len(heads) for heads in server.heads] == [4, 1]


async def test_connection_is_not_used_again_when_it_was_idle_for_long() -> None:
    """The server may be closing it at that moment."""
    server, clock = Server(), Clock()
    async with serving(server, clock) as client:
        await post(client)
        clock.now += connections.IDLE_S
        await post(client)
    assert [len(heads) for heads in server.heads] == [1, 1]


@pytest.mark.parametrize(
    ("after", "close"), [(b"", True), (b"HTTP/1.1 408 Request Time-out\r\n\r\n", False)]
)
async def test_connection_is_not_used_again_when_the_server_ends_it(
    after: bytes, close: bool
) -> None:
    """It closes it, or sends what was not requested."""
    server = Server(after=after, close=close)
    async with serving(server) as client:
        await post(client)
        if close:
            await until(lambda: not client._idle[0][0].usable)
        assert (await post(client)).status == 201
    assert [len(heads) for heads in server.heads] == [1, 1]


async def test_connection_is_closed_when_its_request_is_cancelled() -> None:
    """Its answer would be taken for that of the next request."""
    requested, ended = asyncio.Event(), asyncio.Event()

    async def stall(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        requested.set()
        with contextlib.suppress(ConnectionError):
            await reader.read()
        ended.set()
        writer.close()

    async with serving(stall) as client:
        sending = asyncio.create_task(post(client))
        await requested.wait()
        sending.cancel()
        await ended.wait()
        with pytest.raises(asyncio.CancelledError):
            await sending


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 201 Created\r\n", b"SSH-2.0-x\r\n\r\n"])
async def test_request_fails_when_its_answer_is_not_complete(answer: bytes) -> None:
    """Whether the server has done what was requested is not known."""
    async with serving(Server(answer, close=True)) as client:
        with pytest.raises(OSError, match=r"closed|not HTTP"):
            await post(client)


async def test_request_is_not_sent_when_no_connection_is_free_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is sent late would end after its deadline."""
    monkeypatch.setattr(connections, "MAX_CONNECTIONS", 1)
    requested, answering = asyncio.Event(), asyncio.Event()
    heads = []

    async def wait(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append(await read_request(reader))
        requested.set()
        await answering.wait()
        writer.write(OK)
        writer.close()

    async with serving(wait) as client:
        sending = asyncio.create_task(post(client))
        await requested.wait()
        with pytest.raises(TimeoutError):
            await post(client, limits=Limits(30.0, 0.0))
        answering.set()
        assert (await sending).status == 201
    assert len(heads) == 1


async def test_path_is_quoted_when_it_would_end_the_line() -> None:
    """A name may come from anybody."""
    server = Server()
    async with serving(server) as client:
        await post(client, "/a b\r\nX: y/ü#?timeout=1ms&dryRun=All")
        with pytest.raises(OSError, match="several lines"):
            await client.send("POST", "/x", {"Accept": "a\r\nX: y"}, b"", LIMITS)
    ((head,),) = server.heads
    assert head.split(b"\r\n")[0] == (
        b"POST /a%20b%0D%0AX:%20y/%C3%BC%23?timeout=1ms&dryRun=All HTTP/1.1"
    )
