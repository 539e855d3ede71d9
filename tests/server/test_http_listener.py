"""Connections that cost more than they are worth: silent ones, half requests, floods."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

import pytest
from aiohttp import web

from fenka.server import listener
from fenka.server.listener import REQUEST_TIMEOUT_S, HttpListener, ThrottledText, serve_app
from tests.fakes.clock import Clock
from tests.waiting import until

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Open = Callable[[], Awaitable[Streams]]
GET = b"GET /%s HTTP/1.1\r\nHost: n\r\n\r\n"


class Served:
    """An application whose answers the test lets go."""

    def __init__(self, most: int) -> None:
        self.clock = Clock()
        self.listener = HttpListener(max_connections=most, clock=self.clock)
        self.begun, self.go_on = asyncio.Event(), asyncio.Event()
        listening = socket.create_server(("127.0.0.1", 0))
        self.port: int = listening.getsockname()[1]
        app = web.Application()
        app.router.add_get("/", self._quick)
        app.router.add_get("/slow", self._slow)
        app.router.add_get("/large", self._large)
        self.serving = serve_app(app, listening, self.listener)

    async def open(self) -> Streams:
        """Connect, and be known."""
        before = self._newest()
        streams = await asyncio.open_connection("127.0.0.1", self.port)
        await until(lambda: self._newest() is not before)
        return streams

    def _newest(self) -> object:
        return next(reversed(self.listener._open), None)

    async def _quick(self, _: web.Request) -> web.Response:
        return web.Response(text="ok")

    async def _slow(self, request: web.Request) -> web.Response:
        with self.listener.protect(request):
            self.begun.set()
            await self.go_on.wait()
            return web.Response(text="ok")

    async def _large(self, _: web.Request) -> web.Response:
        return web.Response(body=bytes(64 * 1024 * 1024))


@contextlib.asynccontextmanager
async def served(most: int = 4) -> AsyncIterator[Served]:
    """Yield an application while it is served."""
    it = Served(most)
    async with it.serving:
        yield it


async def ok(streams: Streams, path: str = "") -> bool:
    """Whether a request on this connection is answered."""
    reader, writer = streams
    with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
        writer.write(GET % path.encode())
        head = await reader.readuntil(b"\r\n\r\n")
        return head.startswith(b"HTTP/1.1 200") and await reader.readexactly(2) == b"ok"
    return False


async def test_request_is_answered_when_many_connections_are_idle() -> None:
    """The one that has waited longest goes; one that is answered stays."""

    async with served() as it:
        reader, writer = await it.open()
        writer.write(GET % b"slow")
        await it.begun.wait()
        silent = []
        for _ in range(20):
            it.clock.now += 0.1
            silent.append(await it.open())
        it.clock.now += 0.1
        newcomer = await asyncio.open_connection("127.0.0.1", it.port)
        assert await ok(newcomer)
        assert it.listener.connections <= 4
        await until(silent[0][0].at_eof)
        it.go_on.set()
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")


async def test_connection_is_closed_when_its_request_stays_incomplete() -> None:
    """Never begun, half a header, half a body; but a connection that was answered is kept."""

    async with served(most=8) as it:
        kept = await it.open()
        assert await ok(kept)
        ended = [await it.open() for _ in range(3)]
        ended[1][1].write(b"GET / HT")
        ended[2][1].write(b"POST / HTTP/1.1\r\nHost: n\r\nContent-Length: 5\r\n\r\nx")
        # Half of the time is not enough.
        it.clock.now += REQUEST_TIMEOUT_S / 2
        it.listener.sweep()
        assert it.listener.connections == 4
        it.clock.now += REQUEST_TIMEOUT_S
        it.listener.sweep()
        for reader, _ in ended:
            with contextlib.suppress(ConnectionError):
                await reader.read()
            assert reader.at_eof() or reader.exception()
        assert await ok(kept)


async def test_connection_is_closed_when_its_answer_is_not_read() -> None:
    """It stands in this side's memory."""

    async with served() as it:
        reader, writer = await asyncio.open_connection("127.0.0.1", it.port, limit=1024)
        writer.write(GET % b"large")
        await until(lambda: it.listener.connections == 1)
        (connection,) = it.listener._open.values()
        await until(lambda: connection.unread_at is not None)
        it.clock.now += 2 * REQUEST_TIMEOUT_S
        it.listener.sweep()
        await until(lambda: it.listener.connections == 0)
        assert reader is not None


async def test_next_request_is_answered_when_connections_flood_the_port() -> None:
    """Five hundred at a time."""

    async with served() as it:
        flood = [
            asyncio.create_task(asyncio.open_connection("127.0.0.1", it.port)) for _ in range(500)
        ]
        await asyncio.gather(*flood, return_exceptions=True)
        assert await ok(await asyncio.open_connection("127.0.0.1", it.port))
        assert it.listener.connections <= 4
        for task in flood:
            if not task.exception():
                task.result()[1].close()


async def test_other_work_runs_when_a_flood_is_accepted() -> None:
    """Connections in the backlog are accepted one at a time, between other work."""

    listening = socket.create_server(("127.0.0.1", 0), backlog=100)
    clients = [socket.create_connection(listening.getsockname()) for _ in range(60)]
    turns: list[int] = []

    class Counting(HttpListener):
        def _admit(self, connection: socket.socket) -> None:
            turns.append(beats)
            connection.close()

    beats = 0
    listener = Counting()
    accepting = asyncio.create_task(listener.run(listening))
    while len(turns) < len(clients):
        beats += 1
        await asyncio.sleep(0)
    accepting.cancel()
    await asyncio.gather(accepting, return_exceptions=True)
    assert len({*turns}) == len(clients)
    for it in clients:
        it.close()


async def test_other_work_runs_when_making_a_text_takes_longer_than_a_slice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And a second reader gets the same text: it is made once."""
    monkeypatch.setattr(listener, "SLICE_S", -1.0)
    steps: list[str] = []

    def parts() -> Iterator[bytes]:
        for number in range(3):
            steps.append(f"part {number}")
            yield b"%d" % number

    async def work() -> None:
        steps.append("work")

    text = ThrottledText(parts)
    first, _, second = await asyncio.gather(text(), work(), text())
    assert (first, second) == (b"012", b"012")
    assert steps == ["part 0", "work", "part 1", "part 2"]
