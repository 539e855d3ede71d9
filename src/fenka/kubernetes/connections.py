"""Sends requests over HTTP/1.1 connections that stay open, at half of the processor time of aiohttp.

`Api` sends writes by it, of which the scheduler has one for each pod. Answers are short and read whole.
Watches, lists and requests through proxies need more than this, and use aiohttp.
"""

import asyncio
import re
import ssl
import time
from collections.abc import Callable
from typing import NamedTuple
from urllib.parse import quote, urlsplit

MAX_CONNECTIONS = 100
IDLE_S = 15.0
"""A connection that was idle for longer is not used again: the server may be closing it."""

_FIELDS = re.compile(rb"(?i)\r\n(connection|content-length|transfer-encoding):([^\r]*)")
_IN_URLS = "/?&=%:@!$'()*+,;~"
"""Characters that have a meaning in a path with a query, or need not be quoted there."""


class Limits(NamedTuple):
    """Seconds for a request, and for the part of it that gets a connection."""

    total_s: float
    connect_s: float


class Answer(NamedTuple):
    """A complete answer. reusable: another request may follow on its connection."""

    status: int
    body: bytes
    reusable: bool


class Connections:
    """The connections to one server, for one event loop.

    Args:
        server: its URL; only host and port count.
        context: for HTTPS.
        server_hostname: the name in the server's certificate; None for its host.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        server: str,
        context: ssl.SSLContext,
        server_hostname: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        url = urlsplit(server)
        self._origin = f"{url.scheme}://{url.netloc}"
        tls = url.scheme == "https"
        self._host, self._port = url.hostname or "", url.port or (443 if tls else 80)
        self._context = context if tls else None
        self._server_hostname = server_hostname if tls else None
        self._clock = clock
        self._host_line = f"Host: {url.netloc.rpartition('@')[2]}\r\n"
        self._slots = asyncio.Semaphore(MAX_CONNECTIONS)
        self._idle: list[tuple[_Connection, float]] = []
        """With the time since when. The last one was used last."""

    async def send(
        self, method: str, url: str, headers: dict[str, str], body: bytes, limits: Limits
    ) -> Answer:
        """Send a request once and return the answer. A cancelled request closes its connection.

        Args:
            method: HTTP's.
            url: one of this server.
            headers: all but Host and Content-Length.
            body: the content.
            limits: of time.

        Raises:
            OSError: the answer did not arrive. TimeoutError is one.
        """
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        if lines.count("\n") != len(headers):
            raise OSError("a header has several lines")
        target = quote(url.removeprefix(self._origin), safe=_IN_URLS)
        head = f"{method} {target} HTTP/1.1\r\n{self._host_line}{lines}Content-Length: {len(body)}"
        begun = asyncio.get_running_loop().time()
        async with asyncio.timeout_at(begun + limits.connect_s) as limit, self._slots:
            connection = self._take_idle() or await self._connect()
            limit.reschedule(begun + limits.total_s)
            try:
                answer = await connection.send(f"{head}\r\n\r\n".encode("latin-1") + body)
            except BaseException:
                connection.close()
                raise
            if answer.reusable:
                self._idle.append((connection, self._clock()))
            else:
                connection.close()
            return answer

    def close(self) -> None:
        """Close the connections that are idle."""
        while self._idle:
            self._idle.pop()[0].close()

    def _take_idle(self) -> "_Connection | None":
        while self._idle:
            connection, since = self._idle.pop()
            if connection.usable and self._clock() - since < IDLE_S:
                return connection
            connection.close()
        return None

    async def _connect(self) -> "_Connection":
        _, connection = await asyncio.get_running_loop().create_connection(
            _Connection,
            self._host,
            self._port,
            ssl=self._context,
            server_hostname=self._server_hostname,
        )
        return connection


class _Connection(asyncio.Protocol):
    """A connection with at most one request at a time."""

    def __init__(self) -> None:
        self._received = bytearray()
        self._answer: asyncio.Future[Answer] | None = None
        self._transport: asyncio.Transport | None = None
        self.usable = True
        """False once it is closed, or has sent what was not requested."""

    def send(self, request: bytes) -> asyncio.Future[Answer]:
        """Send a request and return its future answer."""
        assert self._transport is not None
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return self._answer

    def close(self) -> None:
        """Close it at once."""
        self.usable = False
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._received += data
        if self._answer is None or self._answer.done():
            self.close()
            return
        try:
            answer = parse_answer(self._received)
        except ValueError:
            self._answer.set_exception(OSError("its answer is not HTTP/1.1"))
            return
        if answer is not None:
            self._received.clear()
            self._answer.set_result(answer)

    def connection_lost(self, exc: Exception | None) -> None:
        self.usable = False
        if self._answer is None or self._answer.done():
            return
        try:
            answer = parse_answer(self._received, ended=True)
        except ValueError:
            answer = None
        if answer is not None:
            self._answer.set_result(answer)
        else:
            closed = OSError(f"the connection was closed: {exc or 'by the server'}")
            self._answer.set_exception(closed)


def parse_answer(data: bytes | bytearray, *, ended: bool = False) -> Answer | None:
    """Return the answer at the beginning of what was received; None if it is not complete.

    ended: the server has closed the connection. Raises ValueError if it is not HTTP/1.1.
    """
    length = data.find(b"\r\n\r\n")
    if length < 0:
        return None
    version, code = data[:length].split(None, 2)[:2]
    status, begin = int(code), length + 4
    if not version.startswith(b"HTTP/1."):
        raise ValueError(version)
    if status < 200:
        # Announcements precede the answer.
        return parse_answer(data[begin:], ended=ended)
    fields = _FIELDS.findall(data, 0, length)
    headers = {name.lower(): value.strip().lower() for name, value in fields}
    reusable = version == b"HTTP/1.1" and headers.get(b"connection") != b"close"
    if headers.get(b"transfer-encoding") == b"chunked":
        body, end = _chunks(data, begin)
    elif status in (204, 304) or b"content-length" in headers:
        end = begin + int(headers.get(b"content-length", 0))
        body = bytes(data[begin:end])
    else:
        reusable, end = False, len(data) if ended else -1
        body = bytes(data[begin:])
    if not 0 < end <= len(data):
        return None
    return Answer(status, body, reusable and end == len(data))


def _chunks(data: bytes | bytearray, begin: int) -> tuple[bytes, int]:
    """Return a chunked body that begins here, and where it ends; -1 if it is not complete."""
    body = bytearray()
    while (line_end := data.find(b"\r\n", begin)) >= 0:
        size = int(bytes(data[begin:line_end]).split(b";")[0], 16)
        begin = line_end + 2
        if size == 0:
            # Trailers may follow, and an empty line.
            end = begin if data[begin : begin + 2] == b"\r\n" else data.find(b"\r\n\r\n", begin) + 2
            return bytes(body), end + 2 if end >= begin else -1
        body += data[begin : begin + size]
        begin += size + 2
    return b"", -1
