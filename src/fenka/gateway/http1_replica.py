"""A connection to a replica: sends one request after the other and passes the responses on.

Connections to replicas that are idle: the next requests use them again.
"""

import asyncio
import socket
import struct
from typing import Protocol

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

from fenka.gateway import heads
from fenka.gateway.exchange import Exchange, Http1Exchange
from fenka.gateway.routing import Replica

_RESET = struct.pack("ii", 1, 0)


def reset(transport: asyncio.Transport) -> None:
    """Close a connection so that its peer sees an error, not the end of the data."""
    connection = transport.get_extra_info("socket")
    if connection is not None and not transport.is_closing():
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    transport.abort()


class Owner(Protocol):
    """Decides what follows the end of an exchange."""

    def finish(self, exchange: Exchange) -> None:
        """Go on after a complete response."""

    def on_unsent(self, exchange: Exchange) -> None:
        """Go on after a request whose client hung up before it was sent."""

    def on_idle(self, connection: "Http1ReplicaConnection") -> None:
        """Keep a connection for another request, if it can take one."""

    def on_failure(self, exchange: Exchange, sentence: str, *, begun: bool) -> None:
        """Go on after a connection without a complete response. begun: the replica has answered a part."""

    def on_lost(self, connection: "Http1ReplicaConnection") -> None:
        """Forget the connection, which has ended."""


class Http1ReplicaConnection(heads.Reader):
    """A connection to a replica.

    Attributes:
        replica: The replica.
        port: The name of the replica's port.
        exchange: The exchange under way, None if the connection is idle.
        idle_since: When the last exchange ended.
        used: At least one exchange was completed.
    """

    def __init__(self, owner: Owner, replica: Replica, port: str) -> None:
        self.replica, self.port = replica, port
        self.exchange: Http1Exchange | None = None
        self.idle_since = 0.0
        self.used = False
        self.reusable = True
        self._owner = owner
        self._transport: asyncio.Transport
        self._connected = self._tunnel = self._paused = False
        self._parser = HttpResponseParser(self)
        self._expect_response()

    def _expect_response(self) -> None:
        self._begun = False
        """Bytes of the response have come."""
        self._out: list[bytes] = []
        self._fields: heads.Fields = []
        self._head_bytes = 0
        self._reason = b""
        self._in_head = True
        self._chunked = self._until_close = False
        self._done = False
        self._error: heads.BadMessage | None = None

    # ---- called by the dispatcher and by the client's connection ----

    def start(self, exchange: Exchange) -> None:
        """Send a request, as far as it has come."""
        assert isinstance(exchange, Http1Exchange)
        self.exchange = exchange
        if not self._connected:
            return
        exchange.upstream = self
        self._transport.write(exchange.head.wire + exchange.take_body())
        exchange.client.on_connected()

    def give_up(self) -> list[Http1Exchange]:
        """Return the request that waits for the connection, which cannot be made."""
        exchange, self.exchange = self.exchange, None
        return [exchange] if exchange is not None else []

    def is_open(self) -> bool:
        """Return whether a request can be sent."""
        return self.reusable and not self._transport.is_closing()

    @property
    def unsent_bytes(self) -> int:
        """Return the bytes that the replica has not read."""
        return self._transport.get_write_buffer_size()

    def send_body(self) -> None:
        """Send what has come of the request's body."""
        assert self.exchange is not None
        self._transport.write(self.exchange.take_body())

    def send(self, data: bytes) -> None:
        """Send bytes of a websocket."""
        self._transport.write(data)

    def pause(self) -> None:
        """Stop reading: the client does not read."""
        self._paused = True
        self._transport.pause_reading()

    def resume(self) -> None:
        """Read again."""
        if self._paused:
            self._paused = False
            self._transport.resume_reading()

    def abort(self) -> None:
        """End the connection at once, and with it the request."""
        self.exchange = None
        reset(self._transport)

    def close(self) -> None:
        """End the connection after what was sent."""
        self.exchange, self.reusable = None, False
        self._transport.close()

    # ---- called by asyncio ----

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the request that waits."""
        assert isinstance(transport, asyncio.Transport)
        self._transport, self._connected = transport, True
        exchange, self.exchange = self.exchange, None
        if exchange is None:
            return
        if exchange.abandoned:
            self._owner.on_unsent(exchange)
            self._owner.on_idle(self)
        else:
            self.start(exchange)

    def pause_writing(self) -> None:
        """Stop reading from the client: the replica does not read."""
        if self.exchange is not None:
            self.exchange.client.pause()

    def resume_writing(self) -> None:
        """Read from the client again."""
        if self.exchange is not None:
            self.exchange.client.resume()

    def connection_lost(self, exc: BaseException | None) -> None:
        """End the response if this is its end; otherwise the exchange has failed."""
        self.reusable = False
        self._owner.on_lost(self)
        exchange, self.exchange = self.exchange, None
        if exchange is None:
            return
        if self._tunnel or (self._until_close and exc is None):
            if self._chunked:
                exchange.client.send(b"0\r\n\r\n")
            self._owner.finish(exchange)
            return
        self._owner.on_failure(
            exchange, "the replica closed the connection without a response", begun=self._begun
        )

    def data_received(self, data: bytes) -> None:
        """Pass on what has come of the response."""
        exchange = self.exchange
        if exchange is None:
            # Bytes that nothing was requested for would answer the next request.
            self.reusable = False
            self._transport.abort()
            return
        if self._tunnel:
            exchange.client.send(data)
            return
        self._begun = True
        try:
            self._parser.feed_data(data)
        except HttpParserUpgrade as upgrade:
            self._switch(exchange, data[upgrade.args[0] :])
            return
        except HttpParserError as error:
            if not self._done:
                self._error = self._error or heads.BadMessage(
                    502, f"the replica sent no HTTP: {error}"
                )
            self.reusable = False
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > 2 * heads.MAX_HEAD_BYTES:
                self._error = heads.BadMessage(
                    502, "the head of the replica's response is too large"
                )
        if self._error is not None:
            self._fail(exchange, self._error)
            return
        if self._out:
            exchange.client.send(b"".join(self._out))
            self._out.clear()
        if self._done:
            self._finish(exchange)

    # ---- called by the parser ----

    def on_message_begin(self) -> None:
        """Distrust the connection if this is a second response to one request."""
        if self._done:
            self.reusable = False

    def on_status(self, reason: bytes) -> None:
        """Take a part of the reason phrase."""
        self._reason += reason

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header field, or a trailer field."""
        self._fields.append((name, value))
        if len(self._fields) > heads.MAX_FIELDS:
            self._error = heads.BadMessage(502, "the replica's response has too many header fields")

    def on_headers_complete(self) -> None:
        """Pass on a final head, one that precedes it, or a switch to a websocket."""
        if self._done or self._error:
            return
        exchange = self.exchange
        assert exchange is not None
        status = self._parser.get_status_code()
        try:
            if status == 101:
                self._out.append(
                    heads.switching_protocols(self._reason, self._fields, exchange.head)
                )
                exchange.status = status
            elif status < 200:
                if exchange.head.http11:
                    self._out.append(heads.informational(status, self._reason, self._fields))
            else:
                self._on_final_head(exchange, status)
        except heads.BadMessage as error:
            self._error = error
        self._fields, self._reason = [], b""

    def _on_final_head(self, exchange: Http1Exchange, status: int) -> None:
        close = exchange.client.closes() or not exchange.complete
        head = heads.read_response(status, self._reason, self._fields, exchange.head, close=close)
        exchange.status, exchange.closing = status, head.close
        self._in_head = False
        self._chunked, self._until_close = head.chunked, head.until_close
        self._out.append(head.wire)
        self.reusable = self._parser.should_keep_alive() and not head.until_close
        # llhttp does not know that the request was HEAD and would wait for a body.
        self._done = exchange.head.method == b"HEAD"

    def on_body(self, data: bytes) -> None:
        """Pass on a part of the body."""
        if self._done or self._error:
            self.reusable = False
        elif self._chunked:
            self._out.append(b"%x\r\n%s\r\n" % (len(data), data))
        else:
            self._out.append(data)

    def on_message_complete(self) -> None:
        """Take the end of the response, or of one that precedes it."""
        if self._in_head or self._done:
            self._fields, self._reason = [], b""
            return
        if self._chunked:
            self._out.append(heads.trailers(self._fields))
        self._done = True

    # ---- the end of an exchange ----

    def _switch(self, exchange: Http1Exchange, rest: bytes) -> None:
        if self._error or exchange.status != 101:
            self._fail(
                exchange, self._error or heads.BadMessage(502, "the replica switched protocols")
            )
            return
        self._tunnel, self.reusable, exchange.closing = True, False, True
        exchange.client.send(b"".join(self._out) + rest)
        exchange.client.on_switched()

    def _finish(self, exchange: Http1Exchange) -> None:
        reusable = self.reusable and exchange.complete
        self.exchange, self.used, self.reusable = None, True, reusable
        if reusable:
            if exchange.head.method == b"HEAD":
                self._parser = HttpResponseParser(self)
            self._expect_response()
            self.resume()
        else:
            self._transport.close()
        self._owner.on_idle(self)
        self._owner.finish(exchange)

    def _fail(self, exchange: Http1Exchange, error: heads.BadMessage) -> None:
        self.exchange = None
        self._transport.abort()
        self._owner.on_failure(exchange, str(error), begun=True)


class Http1Pool:
    """Idle connections of HTTP/1.1.

    Args:
        owner: decides what follows each exchange.
        idle_s: seconds for which an idle connection is used again.
    """

    def __init__(self, owner: Owner, idle_s: float) -> None:
        self._owner, self._idle_s = owner, idle_s
        self._idle: dict[tuple[Replica, str], list[Http1ReplicaConnection]] = {}

    def take(self, replica: Replica, port: str, now: float) -> Http1ReplicaConnection | None:
        """Return a connection that a request can be sent on, None if there is none."""
        idle = self._idle.get((replica, port))
        while idle:
            # The last one is the most likely to be still open, and others may end.
            connection = idle.pop()
            if connection.is_open() and now - connection.idle_since < self._idle_s:
                return connection
            connection.close()
        return None

    def make(self, replica: Replica, port: str) -> Http1ReplicaConnection:
        """Return the protocol of a new connection."""
        return Http1ReplicaConnection(self._owner, replica, port)

    def put(self, connection: Http1ReplicaConnection, now: float) -> None:
        """Keep a connection whose exchange is complete, or close it."""
        if not connection.is_open():
            return
        if connection.replica.terminating:
            connection.close()
            return
        connection.idle_since = now
        self._idle.setdefault((connection.replica, connection.port), []).append(connection)

    def discard(self, connection: Http1ReplicaConnection) -> None:
        """Forget a connection that has ended."""
        idle = self._idle.get((connection.replica, connection.port))
        if idle and connection in idle:
            idle.remove(connection)

    def close_idle(self, replica: Replica) -> None:
        """Close the idle connections to a replica that is to end."""
        for key in [key for key in self._idle if key[0] is replica]:
            for connection in self._idle.pop(key):
                connection.close()

    def tick(self, now: float) -> None:
        """Close connections that have been idle for too long."""
        for key, idle in list(self._idle.items()):
            while idle and now - idle[0].idle_since > self._idle_s:
                idle.pop(0).close()
            if not idle:
                del self._idle[key]

    def close(self) -> None:
        """Close all."""
        for idle in self._idle.values():
            for connection in list(idle):
                connection.close()
        self._idle.clear()
