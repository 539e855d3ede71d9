"""Accepts HTTP connections and bounds their cost: how many are open, and how long each may be idle.

asyncio's servers accept without a limit, and aiohttp waits long for a request. Here a new connection closes
the one that has been idle longest, so idle connections, however many, exclude no caller.
"""

import asyncio
import contextlib
import logging
import socket
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence

from aiohttp import web
from aiohttp.typedefs import Handler

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 256
"""Connections to one port."""
MAX_HANDSHAKES = 128
"""Connections in their TLS handshake, whose callers are not known yet."""
MAX_READERS = 64
"""Connections to a read-only port: each may have a long answer in memory."""
BACKLOG = 128
HANDSHAKE_TIMEOUT_S = 5.0
REQUEST_TIMEOUT_S = 10.0
"""From the first byte of a request to its last; also how long a caller may leave an answer unread."""
SWEEP_INTERVAL_S = 1.0
THROTTLE_FACTOR = 4
"""A text is made again only after this many times as long as making it took, however many read it."""
SLICE_S = 0.002
"""For so long a text is made before other requests are served."""
LOG_INTERVAL_S = 60.0
"""Between two log lines about refused connections."""

Context = Callable[[], ssl.SSLContext | None]


class _Connection(asyncio.Protocol):
    """Passes events of one connection to aiohttp, and records since when its caller is awaited."""

    def __init__(self, handler: web.RequestHandler, listener: "HttpListener") -> None:
        self.handler = handler
        self._listener = listener
        self.requested_at: float | None = listener.clock()
        """Since when a request is awaited or incomplete, None if none has begun."""
        self.unread_at: float | None = None
        """Since when the caller does not read its answer, None if it reads."""
        self.used_at = listener.clock()
        self.busy = False
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self.handler.connection_made(transport)
        self._listener.on_open(self)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._listener.on_close(self)
        self.handler.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.requested_at is None:
            self.requested_at = self._listener.clock()
        self.handler.data_received(data)

    def eof_received(self) -> None:
        self.handler.eof_received()

    def pause_writing(self) -> None:
        self.unread_at = self._listener.clock()
        self.handler.pause_writing()

    def resume_writing(self) -> None:
        self.unread_at = None
        self.handler.resume_writing()

    def overdue(self, now: float) -> bool:
        """Return whether the caller has kept the server waiting for too long."""
        starts = (None if self.busy else self.requested_at), self.unread_at
        return any(start is not None and now - start > REQUEST_TIMEOUT_S for start in starts)

    def end(self) -> None:
        """Close it at once."""
        self._listener.on_close(self)
        if self._transport is not None:
            self._transport.abort()


class HttpListener:
    """Listens on one port. `run` accepts until it is cancelled; then `close` ends what is open.

    Args:
        context: returns the TLS context of the next connection, None for plain HTTP.
        max_connections: connections at a time.
    """

    server: web.Server
    """Makes the handler of each connection; set before `run`."""

    def __init__(
        self,
        context: Context = lambda: None,
        *,
        max_connections: int = MAX_CONNECTIONS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._context, self._max_connections = context, max_connections
        self.clock = clock
        self._open: dict[web.RequestHandler, _Connection] = {}
        self._handshaking: dict[asyncio.Task[None], socket.socket] = {}
        self._logged_at: float | None = None

    @property
    def connections(self) -> int:
        """Return the number of open connections, without those in their handshake."""
        return len(self._open)

    @contextlib.contextmanager
    def protect(self, request: web.BaseRequest) -> Iterator[None]:
        """Protect the connection of a complete request from being closed for others."""
        connection = self._open.get(request.protocol)
        if connection is None:
            yield
            return
        connection.busy = True
        try:
            yield
        finally:
            connection.busy = False

    def on_answered(self, request: web.BaseRequest) -> None:
        """Count the connection as idle: its next request may begin at any time."""
        connection = self._open.get(request.protocol)
        if connection is not None:
            connection.used_at, connection.requested_at = self.clock(), None

    async def run(self, listening: socket.socket) -> None:
        """Accept until cancelled. The socket is closed at the end."""
        loop = asyncio.get_running_loop()
        listening.setblocking(False)
        sweeping = asyncio.create_task(self._sweep())
        try:
            while True:
                try:
                    connection, _ = await loop.sock_accept(listening)
                except OSError as error:
                    # No descriptor is free, or the caller has gone. Other callers may succeed.
                    self._log(f"a connection was not accepted: {error}")
                    await asyncio.sleep(SWEEP_INTERVAL_S / 10)
                    continue
                self._admit(connection)
                # Accepting never waits while the backlog is full, so let open connections run.
                await asyncio.sleep(0)
        finally:
            sweeping.cancel()
            listening.close()

    def close(self) -> None:
        """End all connections."""
        for task in self._handshaking:
            task.cancel()
        for connection in list(self._open.values()):
            connection.end()

    def sweep(self) -> None:
        """End connections whose callers have kept the server waiting for too long."""
        now = self.clock()
        for connection in [opened for opened in self._open.values() if opened.overdue(now)]:
            connection.end()

    # ---- called by connections ----

    def on_open(self, connection: _Connection) -> None:
        """Count a connection that is established."""
        self._open[connection.handler] = connection
        if len(self._open) > self._max_connections:
            # If all others are busy, that is the newest.
            idle = (opened for opened in self._open.values() if not opened.busy)
            min(idle, key=lambda opened: opened.used_at).end()

    def on_close(self, connection: _Connection) -> None:
        """Drop a connection that has ended."""
        self._open.pop(connection.handler, None)

    # ---- one connection ----

    def _admit(self, connection: socket.socket) -> None:
        if len(self._handshaking) >= MAX_HANDSHAKES:
            oldest = next(iter(self._handshaking))
            oldest.cancel()
            self._handshaking.pop(oldest)
        task = asyncio.create_task(self._handshake(connection))
        self._handshaking[task] = connection
        task.add_done_callback(lambda done: self._handshaking.pop(done, None))

    async def _handshake(self, connection: socket.socket) -> None:
        context = self._context()
        within = None if context is None else HANDSHAKE_TIMEOUT_S
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: _Connection(self.server(), self),
                connection,
                ssl=context,
                ssl_handshake_timeout=within,
                ssl_shutdown_timeout=None if context is None else 1.0,
            )
        except (OSError, TimeoutError) as error:
            self._log(f"a connection was refused: {error or 'its TLS handshake took too long'}")
        except asyncio.CancelledError:
            connection.close()
            raise

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_INTERVAL_S)
            self.sweep()

    def _log(self, sentence: str) -> None:
        """Log it, but not for each connection of a flood."""
        now = self.clock()
        if self._logged_at is None or now - self._logged_at >= LOG_INTERVAL_S:
            self._logged_at = now
            log.warning("%s", sentence)


class ThrottledText:
    """A text that is made on demand, and not again for THROTTLE_FACTOR times as long as that took.

    It is made in slices, so that a long one does not delay other requests.
    """

    def __init__(
        self,
        make: Callable[[], Iterable[bytes]],
        refresh: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """Make nothing yet.

        Args:
            make: Returns the parts of the text. Making each takes less than a slice.
            refresh: Fetches before each text what the text is made of.
        """
        self._make, self._refresh = make, refresh
        self._made, self._until = b"", 0.0
        self._making = asyncio.Lock()

    async def __call__(self) -> bytes:
        """Return the text."""
        async with self._making:
            begun = resumed = time.perf_counter()
            if begun >= self._until:
                if self._refresh is not None:
                    await self._refresh()
                parts = []
                for part in self._make():
                    parts.append(part)
                    if time.perf_counter() - resumed > SLICE_S:
                        await asyncio.sleep(0)
                        resumed = time.perf_counter()
                self._made = b"".join(parts)
                now = time.perf_counter()
                self._until = now + THROTTLE_FACTOR * (now - begun)
            return self._made


def listening_socket(address: str | None, port: int) -> socket.socket:
    """Return a listening socket. address: None for all addresses, of both families if there are two."""
    if address is None:
        dual_stack = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual_stack else socket.AF_INET
        return socket.create_server(
            ("", port), family=family, backlog=BACKLOG, dualstack_ipv6=dual_stack
        )
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, port), family=family, backlog=BACKLOG)


LISTENER: web.AppKey[HttpListener] = web.AppKey("listener", HttpListener)
"""The listener of an application that `serve_app` serves."""


@web.middleware
async def _answered(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    finally:
        request.app[LISTENER].on_answered(request)


@contextlib.asynccontextmanager
async def serve_app(
    app: web.Application,
    listening: socket.socket,
    listener: HttpListener | None = None,
    *,
    keep_alive_s: float = 15,
    others: Sequence[socket.socket] = (),
) -> AsyncIterator[None]:
    """Serve the application on this socket, and on the others, while the block runs."""
    app[LISTENER] = listener = listener or HttpListener()
    app.middlewares.insert(0, _answered)
    runner = web.AppRunner(
        app,
        access_log=None,
        keepalive_timeout=keep_alive_s,
        shutdown_timeout=1,
        # A compressed body is larger than it says.
        auto_decompress=False,
        lingering_time=1,
    )
    await runner.setup()
    assert runner.server is not None
    listener.server = runner.server
    accepting = [asyncio.create_task(listener.run(place)) for place in (listening, *others)]
    try:
        yield
    finally:
        for task in accepting:
            task.cancel()
        await asyncio.gather(*accepting, return_exceptions=True)
        await runner.cleanup()
        listener.close()
