"""A client's connection: reads one request after the other, and writes the responses in that order.

An end of the client's data counts as its hanging up, as in other proxies. A client that has closed its
connection cannot be distinguished from one that has closed only its half.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from http import HTTPStatus

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser

from fenka.gateway import heads
from fenka.gateway.client_registry import ClientRegistry, client_of
from fenka.gateway.exchange import Http1Exchange
from fenka.gateway.http1_replica import reset
from fenka.gateway.http2_client import Http2ClientConnection
from fenka.gateway.http2_connection import PREFACE

MAX_PIPELINED = 32
"""Requests that a client may send before it has the response to the first."""
MAX_UNSENT_BYTES = 64 * 1024
"""Bytes of a request's body, or behind a request, that are read before a replica takes them."""
FIELD_BYTES = 160
"""Memory of a header field besides its own bytes."""

_TOO_LARGE = heads.BadMessage(
    431, f"the head of the request exceeds {heads.MAX_HEAD_BYTES // 1024} KiB"
)
_TOO_MANY_FIELDS = heads.BadMessage(
    431, f"the request has more than {heads.MAX_FIELDS} header fields"
)
_TOO_MANY = heads.BadMessage(
    429, f"more than {MAX_PIPELINED} requests are unanswered on one connection"
)


class Http1ClientConnection(heads.Reader):
    """A client's connection.

    Attributes:
        port: The name of the port that the client connected to.
        client: Whose connection it is.
    """

    def __init__(self, registry: ClientRegistry, port: str) -> None:
        self.port, self.client = port, ""
        self._registry, self._dispatcher = registry, registry.dispatcher
        self._clock: Callable[[], float] = self._dispatcher.clock
        self._transport: asyncio.Transport
        self._address = b""
        self._parser = HttpRequestParser(self)
        self._url, self._fields, self._head_bytes = b"", heads.Fields(), 0
        self._receiving: Http1Exchange | None = None
        """The request whose body is read."""
        self._active: Http1Exchange | None = None
        """The request that is answered."""
        self._queue: deque[Http1Exchange] = deque()
        """Requests behind it."""
        self._held = b""
        """The bytes behind a request for a websocket."""
        self._error: heads.BadMessage | None = None
        """The last answer to the client, after all requests."""
        self._first = b""
        """The first bytes, which may be those of HTTP/2."""
        self._selected = self._upgrading = self._tunnel = False
        self._pauses: set[str] = set()
        self._idle_since: float = self._clock()
        self._read_at = self._rate_since = self._idle_since
        self._rate_bytes = 0
        """Bytes of a body since then."""
        self._head_since: float | None = None
        self._unread_since: float | None = None
        self._linger_since: float | None = None

    @property
    def idle(self) -> bool:
        """Return whether no complete head of a request is unanswered."""
        return self._active is None

    @property
    def held_bytes(self) -> int:
        """Return the bytes in memory of what the client has sent, and has not read."""
        size = len(self._held) + self._transport.get_write_buffer_size()
        if self._head_since is not None:
            size += 2 * self._head_bytes + FIELD_BYTES * len(self._fields)
        if self._active is not None:
            upstream = self._active.upstream
            size += self._active.size if upstream is None else upstream.unsent_bytes
        return size + sum(queued.size for queued in self._queue)

    @property
    def unread(self) -> bool:
        """Return whether the client does not read its response."""
        return self._unread_since is not None

    @property
    def paused(self) -> bool:
        """Return whether the client is not read."""
        return bool(self._pauses)

    # ---- called by asyncio ----

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Await the first request."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        address, self.client = client_of(transport)
        self._address = address.encode()
        self._registry.on_open(self)

    def connection_lost(self, _: BaseException | None) -> None:
        """End the request under way: nobody waits for its response."""
        self._registry.on_close(self)
        exchange, self._active = self._active, None
        self._queue.clear()
        if exchange is not None:
            self._dispatcher.abandon(exchange)
        # These refer to this object, and would keep its memory until the next full garbage collection.
        self._receiving, self._parser = None, HttpRequestParser(None)
        self._held, self._fields = b"", []

    def eof_received(self) -> None:
        """Close the connection, which ends the request under way."""

    def pause_writing(self) -> None:
        """Stop reading from the replica: the client does not read."""
        self._unread_since = self._clock()
        if self._active is not None and self._active.upstream is not None:
            self._active.upstream.pause()

    def resume_writing(self) -> None:
        """Read from the replica again."""
        self._unread_since = None
        if self._active is not None and self._active.upstream is not None:
            self._active.upstream.resume()

    def data_received(self, data: bytes) -> None:
        """Parse what has come, or pass it on if the connection is a websocket."""
        if self._linger_since is not None or self._error is not None:
            return
        if self._tunnel:
            assert self._active is not None
            assert self._active.upstream is not None
            self._active.upstream.send(data)
            return
        self._read_at = self._clock()
        if not self._selected:
            data = self._select_protocol(data)
            if not data:
                return
        if self._upgrading:
            self._hold(data)
            return
        self._rate_bytes += len(data)
        self._feed(data)
        self._advance()
        self._registry.account(self)

    # ---- called by the dispatcher and by the replica's connection ----

    def send(self, data: bytes) -> None:
        """Send a part of the current response."""
        self._transport.write(data)

    def closes(self) -> bool:
        """Return whether the connection ends after the current response in any case."""
        return self._registry.draining or (self._error is not None and not self._queue)

    def on_connected(self) -> None:
        """Continue to read the current request."""
        self._restart_clocks()
        self._resume("body")

    def on_finished(self) -> None:
        """Go on to the next request."""
        exchange, self._active = self._active, None
        assert exchange is not None
        self._resume("replica")
        if self._tunnel:
            self._transport.close()
        elif exchange.closing or not exchange.complete:
            self._shut(lingering=not exchange.complete)
        else:
            if self._upgrading:
                # The replica did not switch protocols, so what followed is the next request.
                self._upgrading = False
                held, self._held = self._held, b""
                self._resume("held")
                self._feed(held)
            self._idle_since = self._clock()
            self._advance()

    def on_switched(self) -> None:
        """Pass all bytes on from now on."""
        assert self._active is not None
        assert self._active.upstream is not None
        self._tunnel = True
        held, self._held = self._held, b""
        if held:
            self._active.upstream.send(held)
        self._resume("held")

    def answer(self, status: int, sentence: str) -> None:
        """Answer the current request with a response of the gateway's own."""
        exchange = self._active
        assert exchange is not None
        exchange.closing = self.closes() or not exchange.head.keep_alive or not exchange.complete
        head_only = exchange.head.method == b"HEAD"
        self._say(status, sentence, close=exchange.closing, head_only=head_only)
        self.on_finished()

    def abort(self) -> None:
        """Reset the connection."""
        self._active = None
        reset(self._transport)

    def drain(self) -> None:
        """End the connection now if it is idle, or with its current response."""
        if self.idle:
            self._transport.close()

    def pause(self) -> None:
        """Stop reading: the replica does not read."""
        self._pause("replica")

    def resume(self) -> None:
        """Read again."""
        self._resume("replica")

    # ---- called by the registry ----

    def check(self, now: float) -> None:
        """End the connection if its client has been waited for too long."""
        timeouts = self._registry.timeouts
        if self._linger_since is not None:
            if now - self._linger_since > timeouts.linger_s:
                self._transport.abort()
        elif self._unread_since is not None and now - self._unread_since > timeouts.unread_s:
            reset(self._transport)
        elif self._head_since is not None and now - self._head_since > timeouts.head_s:
            self._refuse(heads.BadMessage(408, "the head of the request took too long"))
        elif self._receiving is not None:
            # A client may await "100 Continue", which only a replica sends.
            taken = self._receiving.upstream is not None and not self._pauses
            elapsed_s = now - self._rate_since
            slow = self._rate_bytes < timeouts.body_bytes_per_s * elapsed_s
            if taken and (
                now - self._read_at > timeouts.body_s
                or (slow and elapsed_s > timeouts.rate_grace_s)
            ):
                self._refuse(heads.BadMessage(408, "the body of the request took too long"))
        elif self._active is None and now - self._idle_since > timeouts.idle_s:
            self._transport.close()

    # ---- called by the parser ----

    def on_message_begin(self) -> None:
        """Take the first byte of a request."""
        self._url, self._fields, self._head_bytes = b"", [], 0
        self._head_since = self._clock()

    def on_url(self, url: bytes) -> None:
        """Take a part of the target."""
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header field. Fields behind a body are not passed on."""
        if self._head_since is not None:
            self._fields.append((name, value))
            if len(self._fields) > heads.MAX_FIELDS:
                self._error = self._error or _TOO_MANY_FIELDS

    def on_headers_complete(self) -> None:
        """Put a valid request behind those that are unanswered."""
        self._head_since = None
        if self._error is None and len(self._queue) >= MAX_PIPELINED:
            self._error = _TOO_MANY
        if self._error is not None:
            return
        parser = self._parser
        try:
            head = heads.read_request(
                parser.get_method(),
                self._url,
                parser.get_http_version(),
                self._fields,
                self._address,
                upgrade=parser.should_upgrade(),
            )
        except heads.BadMessage as error:
            self._error = error
            return
        self._receiving = Http1Exchange(self, head, self._read_at)
        self._queue.append(self._receiving)

    def on_body(self, data: bytes) -> None:
        """Take a part of the body."""
        if self._receiving is not None:
            self._receiving.add_body(data)

    def on_message_complete(self) -> None:
        """Take the end of the request."""
        exchange, self._receiving = self._receiving, None
        if exchange is not None:
            exchange.end_body()
            self._upgrading = exchange.head.websocket

    # ---- reading ----

    def _feed(self, data: bytes) -> None:
        """Parse. A parser stops behind a request that upgrades, and another goes on."""
        while data and self._error is None:
            try:
                self._parser.feed_data(data)
            except HttpParserUpgrade as upgrade:
                self._parser = HttpRequestParser(self)
                data = data[upgrade.args[0] :]
                if self._upgrading:
                    self._hold(data)
                    return
                continue
            except HttpParserError as error:
                self._error = self._error or heads.BadMessage(
                    400, f"the request is no HTTP/1.1: {error}"
                )
            if self._head_since is not None:
                self._head_bytes += len(data)
                if self._head_bytes >= heads.MAX_HEAD_BYTES:
                    self._error = self._error or _TOO_LARGE
            return

    def _select_protocol(self, data: bytes) -> bytes:
        """Return what is to be parsed: nothing while that is unknown, or if the client speaks HTTP/2."""
        self._first += data
        if self._first.startswith(PREFACE):
            self._registry.on_close(self)
            http2 = Http2ClientConnection(self._registry, self.port)
            self._transport.set_protocol(http2)
            http2.connection_made(self._transport)
            http2.data_received(self._first)
            return b""
        if PREFACE.startswith(self._first):
            self._head_since = self._head_since or self._read_at
            return b""
        self._selected = True
        return self._first

    def _hold(self, data: bytes) -> None:
        self._held += data
        if len(self._held) > MAX_UNSENT_BYTES:
            self._pause("held")

    def _advance(self) -> None:
        """Go on after bytes have come, or after a response."""
        exchange = self._active
        if self._error is not None and self._queue and not self._queue[-1].complete:
            # No replica needs to see a request that is known to be invalid.
            self._queue.pop()
        if exchange is None:
            if self._queue:
                exchange = self._active = self._queue.popleft()
                self._dispatcher.submit(exchange)
        elif exchange.body:
            self._dispatcher.on_body(exchange)
        if self._error is not None:
            self._refuse(self._error)
            return
        exchange = self._active
        if (
            exchange is not None
            and exchange.upstream is None
            and exchange.body_bytes > MAX_UNSENT_BYTES
        ):
            self._pause("body")
        waiting = sum(queued.size for queued in self._queue)
        if waiting > MAX_UNSENT_BYTES:
            self._pause("queue")
        elif self._pauses:
            self._resume("queue")

    def _pause(self, reason: str) -> None:
        if not self._pauses:
            self._transport.pause_reading()
        self._pauses.add(reason)

    def _resume(self, reason: str) -> None:
        if reason in self._pauses:
            self._pauses.remove(reason)
            if not self._pauses:
                self._restart_clocks()
                self._transport.resume_reading()

    def _restart_clocks(self) -> None:
        self._read_at = self._rate_since = self._clock()
        self._rate_bytes = 0

    # ---- the end ----

    def _refuse(self, error: heads.BadMessage) -> None:
        """Answer an invalid request and end the connection, after the responses to valid ones."""
        if self._linger_since is not None or self._transport.is_closing():
            return
        self._error, self._head_since = error, None
        exchange = self._active
        if exchange is not None:
            if exchange.complete:
                return
            # The error is in the body of the request that is being answered.
            self._active = None
            self._dispatcher.abandon(exchange)
            if exchange.status:
                reset(self._transport)
                return
        self._dispatcher.statistics.reject("invalid_request")
        self._say(error.status, str(error), close=True)
        self._shut(lingering=True)

    def _say(self, status: int, sentence: str, *, close: bool, head_only: bool = False) -> None:
        reason = HTTPStatus(status).phrase
        self._transport.write(
            heads.sentence_response(status, reason, sentence, close=close, head_only=head_only)
        )

    def _shut(self, *, lingering: bool) -> None:
        """Close the connection. lingering: the client still sends, and would lose the response by a reset."""
        self._queue.clear()
        self._receiving = None
        if not lingering:
            self._transport.close()
        elif not self._transport.is_closing():
            self._linger_since = self._clock()
            self._pauses.clear()
            self._transport.resume_reading()
            self._transport.write_eof()
