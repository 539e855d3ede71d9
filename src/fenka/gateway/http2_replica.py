"""HTTP/2 to replicas: many requests at a time on one connection."""

import asyncio
from collections.abc import Callable
from typing import Protocol

from h2.errors import ErrorCodes
from h2.events import (
    DataReceived,
    Event,
    InformationalResponseReceived,
    RemoteSettingsChanged,
    ResponseReceived,
    StreamEnded,
    StreamReset,
    TrailersReceived,
    WindowUpdated,
)
from h2.exceptions import ProtocolError

from fenka.gateway.exchange import ClientSide, Exchange
from fenka.gateway.heads import Fields, RequestHead
from fenka.gateway.http2_connection import MAX_STREAMS, Half, Http2Connection
from fenka.gateway.routing import Replica

LAST_STREAM = 2**31 - 1 - 2 * MAX_STREAMS
"""A connection with a higher stream takes no more: identifiers are used once."""


class Http2Head(RequestHead):
    """The head of a request of HTTP/2. fields: as a replica gets them."""

    __slots__ = ("fields",)

    def __init__(self, method: bytes, fields: Fields) -> None:
        super().__init__(method, b"", http11=False, keep_alive=True)
        self.fields = fields


class Http2Client(ClientSide, Protocol):
    """The client's side of a stream, as the replica's uses it."""

    request: Half

    def on_response(self, response: Half, head: Fields) -> None:
        """Send a response, as far as it has come."""

    def on_informational(self, head: Fields) -> None:
        """Send a response that precedes the final one."""

    def reset(self, code: ErrorCodes | int) -> None:
        """End the stream as the replica has."""


class Http2Exchange(Exchange):
    """A stream of a client, and the stream that it is passed on to. response: what came of the response."""

    __slots__ = ("response",)

    client: Http2Client
    head: Http2Head

    def __init__(self, client: Http2Client, head: Http2Head, began_at: float) -> None:
        super().__init__(client, head, began_at)
        self.response: Half | None = None


class Owner(Protocol):
    """Decides what follows the end of an exchange."""

    clock: Callable[[], float]

    def finish(self, exchange: Exchange) -> None:
        """Go on after a complete response."""

    def on_failure(self, exchange: Exchange, sentence: str, *, begun: bool) -> None:
        """Go on after a connection without a complete response."""

    def on_reset(self, exchange: Exchange) -> None:
        """Go on after a stream without a complete response."""

    def on_unsent(self, exchange: Exchange) -> None:
        """Go on after a request whose client hung up before it was sent."""


class _ReplicaStream:
    """A stream at a replica."""

    def __init__(
        self, connection: "Http2ReplicaConnection", stream: int, exchange: Http2Exchange
    ) -> None:
        self._connection, self._stream, self._exchange = connection, stream, exchange

    def send_body(self) -> None:
        self._exchange.client.request.pump()

    def abort(self) -> None:
        self._connection.cancel(self._stream)

    def close(self) -> None:
        self.abort()


class Http2ReplicaConnection(Http2Connection):
    """A connection to a replica. Requests may be started before it is open."""

    def __init__(self, owner: Owner, pool: "Http2Pool", replica: Replica, port: str) -> None:
        super().__init__(owner.clock, client_side=True)
        self.replica, self.port = replica, port
        self._owner, self._pool = owner, pool
        self._early: list[Http2Exchange] = []
        self._exchanges: dict[int, Http2Exchange] = {}

    @property
    def idle(self) -> bool:
        """Return whether no request is unanswered."""
        return not self._exchanges and not self._early

    def accepts(self) -> bool:
        """Return whether another request can be started."""
        if self._transport is None:
            return len(self._early) < MAX_STREAMS
        return (
            self.open
            and self._filter.last_stream is None
            and self._h2.highest_outbound_stream_id < LAST_STREAM
            and len(self._exchanges)
            < min(MAX_STREAMS, self._h2.remote_settings.max_concurrent_streams)
        )

    def start(self, exchange: Exchange) -> None:
        """Send a request, as far as it has come."""
        assert isinstance(exchange, Http2Exchange)
        if self._transport is None:
            self._early.append(exchange)
            return
        stream = self._h2.get_next_available_stream_id()
        self._exchanges[stream] = exchange
        exchange.upstream = _ReplicaStream(self, stream, exchange)
        request = exchange.client.request
        self.sending[stream] = request
        request.connect(self, stream, exchange.head.fields)

    def give_up(self) -> list[Http2Exchange]:
        """Return the requests that wait for the connection, which cannot be made."""
        self._pool.discard(self)
        early, self._early = self._early, []
        return early

    def cancel(self, stream: int) -> None:
        """End a request that nobody waits for."""
        self._exchanges.pop(stream, None)
        self.reset(stream, ErrorCodes.CANCEL)
        self._close_if_done()

    def retire(self) -> None:
        """Start no more requests, and end after those that are unanswered."""
        self._pool.discard(self)
        self._close_if_done()

    # ---- called by asyncio ----

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start the requests that wait."""
        super().connection_made(transport)
        early, self._early = self._early, []
        for exchange in early:
            if exchange.abandoned:
                self._owner.on_unsent(exchange)
            else:
                self.start(exchange)

    def connection_lost(self, _: BaseException | None) -> None:
        """Fail the requests that are unanswered."""
        self._pool.discard(self)
        self._transport = None
        self.sending.clear()
        exchanges, self._exchanges = self._exchanges, {}
        for exchange in exchanges.values():
            self._owner.on_failure(
                exchange, "the replica closed the connection without a response", begun=True
            )

    # ---- called by h2's events ----

    def on_event(self, event: Event) -> None:
        """Take an event of a stream or of the connection."""
        if isinstance(event, RemoteSettingsChanged):
            self._pump_all()
        elif isinstance(event, WindowUpdated):
            self.on_window(event.stream_id)
        elif isinstance(event, _STREAM_EVENTS):
            exchange = self._exchanges.get(event.stream_id or 0)
            if exchange is not None:
                self._on_stream(event.stream_id or 0, exchange, event)

    def _on_stream(self, stream: int, exchange: Http2Exchange, event: Event) -> None:
        now = self.clock()
        response = exchange.response
        if isinstance(event, DataReceived) and response is not None:
            response.add(event.data, event.flow_controlled_length, now)
            response.ended = event.stream_ended is not None
            response.pump()
        elif isinstance(event, ResponseReceived):
            exchange.status = _status(event.headers)
            exchange.response = response = Half(self, stream, now)
            response.ended = event.stream_ended is not None
            exchange.client.on_response(response, event.headers)
        elif isinstance(event, InformationalResponseReceived):
            exchange.client.on_informational(event.headers)
        elif isinstance(event, TrailersReceived) and response is not None:
            response.trailers = event.headers
        elif isinstance(event, StreamEnded) and response is not None:
            self._on_ended(stream, exchange, response)
        elif isinstance(event, StreamReset):
            del self._exchanges[stream]
            self.sending.pop(stream, None)
            self._owner.on_reset(exchange)
            exchange.client.reset(event.error_code or ErrorCodes.NO_ERROR)
            self._close_if_done()

    def _on_ended(self, stream: int, exchange: Http2Exchange, response: Half) -> None:
        del self._exchanges[stream]
        if not exchange.client.request.finished:
            # The replica has answered without the rest of the request.
            self.reset(stream, ErrorCodes.NO_ERROR)
        self.sending.pop(stream, None)
        response.ended = True
        response.pump()
        self._owner.finish(exchange)
        self._close_if_done()

    def after_events(self) -> None:
        """Fail the requests that the replica will not serve: it is going away."""
        last = self._filter.last_stream
        if last is None:
            return
        for stream in [stream for stream in self._exchanges if stream > last]:
            exchange = self._exchanges.pop(stream)
            self.sending.pop(stream, None)
            self._owner.on_reset(exchange)
            exchange.client.reset(ErrorCodes.REFUSED_STREAM)
        self.retire()

    def _close_if_done(self) -> None:
        retired = self.replica.terminating or self._filter.last_stream is not None
        if retired and self.idle:
            self.close()


class Http2Pool:
    """Connections of HTTP/2 to replicas, open or being made."""

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self._connections: dict[tuple[Replica, str], list[Http2ReplicaConnection]] = {}

    def take(self, replica: Replica, port: str, _: float) -> Http2ReplicaConnection | None:
        """Return a connection that accepts a request, None if there is none."""
        connections = self._connections.get((replica, port), ())
        return next((connection for connection in connections if connection.accepts()), None)

    def make(self, replica: Replica, port: str) -> Http2ReplicaConnection:
        """Return the protocol of a new connection, which takes requests at once."""
        connection = Http2ReplicaConnection(self._owner, self, replica, port)
        self._connections.setdefault((replica, port), []).append(connection)
        return connection

    def discard(self, connection: Http2ReplicaConnection) -> None:
        """Start no more requests on a connection."""
        key = connection.replica, connection.port
        connections = self._connections.get(key, [])
        if connection in connections:
            connections.remove(connection)
        if not connections:
            self._connections.pop(key, None)

    def close_idle(self, replica: Replica) -> None:
        """End the connections to a replica that is to end, after what is unanswered."""
        for key in [key for key in self._connections if key[0] is replica]:
            for connection in list(self._connections[key]):
                connection.retire()

    def close(self) -> None:
        """End all."""
        for connections in list(self._connections.values()):
            for connection in list(connections):
                connection.close()


_STREAM_EVENTS = (
    DataReceived,
    InformationalResponseReceived,
    ResponseReceived,
    StreamEnded,
    StreamReset,
    TrailersReceived,
)


def _status(head: Fields) -> int:
    value = next((value for name, value in head if name == b":status"), b"")
    if len(value) != 3 or not value.isdigit():
        raise ProtocolError("the status is no number")
    return int(value)
