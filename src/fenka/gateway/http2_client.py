"""HTTP/2 from clients: each stream is a request of its own, and gets a replica of its own."""

import asyncio

from h2.errors import ErrorCodes
from h2.events import (
    DataReceived,
    Event,
    PriorityUpdated,
    RemoteSettingsChanged,
    RequestReceived,
    StreamEnded,
    StreamReset,
    TrailersReceived,
    WindowUpdated,
)

from fenka.gateway.client_registry import ClientRegistry, client_of
from fenka.gateway.heads import Fields
from fenka.gateway.http2_connection import Half, Http2Connection
from fenka.gateway.http2_replica import Http2Exchange, Http2Head

MAX_RESETS = 500
"""Requests that a client may reset at a time. Each costs the gateway and a replica more than the client."""
MAX_EMPTY_FRAMES = 1000
"""Frames at a time without data or a request: of DATA, PRIORITY and SETTINGS."""
REGAINED_PER_CHECK = 20
"""So many more of both are allowed at each check."""

STATE_BYTES = 64 * 1024
"""Memory of a connection's tables and streams besides their data."""


class Http2Stream:
    """A client's stream.

    Attributes:
        port: The name of the port that the client connected to.
        request: What comes of the request.
        exchange: The request and its response.
        answered: The replica has sent everything, or the gateway has.
        head_bytes: Bytes of the request's head.
    """

    def __init__(
        self, connection: "Http2ClientConnection", stream: int, head: Http2Head, now: float
    ) -> None:
        self.port = connection.port
        self.request = Half(connection, stream, now)
        self.exchange = Http2Exchange(self, head, now)
        self.answered = False
        self.head_bytes = 0
        self._connection, self._stream = connection, stream

    def on_response(self, response: Half, head: Fields) -> None:
        """Send a response, as far as it has come."""
        self._connection.sending[self._stream] = response
        response.connect(self._connection, self._stream, head)

    def on_informational(self, head: Fields) -> None:
        """Send a response that precedes the final one."""
        self._connection.send_head(self._stream, head, end=False)

    def on_finished(self) -> None:
        """Take note that the replica has sent everything."""
        self.answered = True
        self._connection.release(self._stream)

    def answer(self, status: int, sentence: str) -> None:
        """Answer with a response of the gateway's own."""
        body = f"{sentence}\n".encode()
        response = Half(self._connection, 0, self._connection.clock())
        if self.exchange.head.method != b"HEAD":
            response.add(body, 0, self._connection.clock())
        response.ended = True
        head = [(b":status", b"%d" % status), (b"content-type", b"text/plain; charset=utf-8")]
        self.on_response(response, [*head, (b"content-length", b"%d" % len(body))])
        self.on_finished()

    def abort(self) -> None:
        """Let the client see that the response is incomplete."""
        self.reset(ErrorCodes.INTERNAL_ERROR)

    def reset(self, code: ErrorCodes | int) -> None:
        """End the stream as the replica has."""
        self.answered = True
        self._connection.end(self._stream, code)


class Http2ClientConnection(Http2Connection):
    """A client's connection of HTTP/2."""

    def __init__(self, registry: ClientRegistry, port: str) -> None:
        super().__init__(registry.dispatcher.clock, client_side=False)
        self.port, self.client = port, ""
        self._registry, self._dispatcher = registry, registry.dispatcher
        self._streams: dict[int, Http2Stream] = {}
        self._idle_since = self.clock()
        self._address = b""
        self._resets = self._empty_frames = 0
        self._last_stream: int | None = None
        """The last stream that is served, once the connection is to end."""

    @property
    def idle(self) -> bool:
        """Return whether no request is unanswered."""
        return not self._streams

    @property
    def held_bytes(self) -> int:
        """Return the bytes in memory of what the client has sent, and has not read."""
        streams = self._streams.values()
        size = STATE_BYTES + self._filter.head_bytes
        size += sum(stream.head_bytes + stream.request.held_bytes for stream in streams)
        size += sum(half.held_bytes for half in self.sending.values())
        return size + (self._transport.get_write_buffer_size() if self._transport else 0)

    # ---- called by the registry ----

    def check(self, now: float) -> None:
        """End the connection, or streams, if the client has been waited for too long."""
        timeouts = self._registry.timeouts
        self._resets = max(0, self._resets - REGAINED_PER_CHECK)
        self._empty_frames = max(0, self._empty_frames - REGAINED_PER_CHECK)
        if self.unread_since is not None and now - self.unread_since > timeouts.unread_s:
            self.abort()
        elif self.idle and now - self._idle_since > timeouts.idle_s:
            self.drain()
        for stream, half in list(self.sending.items()):
            if half.waits and now - half.moved_at > timeouts.unread_s:
                self._forsake(stream)
                self.end(stream, ErrorCodes.CANCEL)

    def drain(self) -> None:
        """Take no more requests, and end after those that are unanswered."""
        if self._last_stream is None:
            self._last_stream = self._h2.highest_inbound_stream_id
            self.go_away()
        if self.idle:
            self.close()

    # ---- called by asyncio ----

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Await requests."""
        super().connection_made(transport)
        assert isinstance(transport, asyncio.Transport)
        address, self.client = client_of(transport)
        self._address = address.encode()
        self._registry.on_open(self)

    def connection_lost(self, _: BaseException | None) -> None:
        """End all requests: nobody waits for the responses."""
        self._registry.on_close(self)
        self._transport = None
        self.sending.clear()
        for stream in list(self._streams):
            self._forsake(stream)
        self._streams.clear()

    # ---- called by streams ----

    def release(self, stream: int) -> None:
        """Forget a stream if both sides have sent everything."""
        state = self._streams.get(stream)
        response = self.sending.get(stream)
        if state is None or not state.answered or (response is not None and not response.finished):
            return
        if not state.request.ended:
            # The client need not send the rest of its request.
            self.end(stream, ErrorCodes.NO_ERROR)
            return
        self._remove(stream)

    def end(self, stream: int, code: ErrorCodes | int) -> None:
        """End a stream at once."""
        self.reset(stream, code)
        self._remove(stream)

    def _remove(self, stream: int) -> None:
        self._streams.pop(stream, None)
        self.sending.pop(stream, None)
        if not self._streams:
            self._idle_since = self.clock()
            if self._last_stream is not None:
                self.close()

    def _forsake(self, stream: int) -> None:
        """End the request of a stream whose client does not wait for the response."""
        state = self._streams.get(stream)
        if state is not None and not state.answered:
            state.answered = True
            self._dispatcher.abandon(state.exchange)

    # ---- called by h2's events ----

    def on_event(self, event: Event) -> None:
        """Take an event of a stream or of the connection."""
        if isinstance(event, PriorityUpdated | RemoteSettingsChanged) or (
            isinstance(event, DataReceived) and not event.data and event.stream_ended is None
        ):
            self._empty_frames += 1
        if isinstance(event, RequestReceived):
            self._on_request(
                event.stream_id or 0, event.headers, ended=event.stream_ended is not None
            )
        elif isinstance(event, RemoteSettingsChanged):
            self._pump_all()
        elif isinstance(event, WindowUpdated):
            self.on_window(event.stream_id)
        elif isinstance(event, DataReceived | TrailersReceived | StreamEnded | StreamReset):
            stream = event.stream_id or 0
            state = self._streams.get(stream)
            if state is not None:
                self._on_stream(stream, state, event)
            elif isinstance(event, DataReceived):
                self.acknowledge(stream, event.flow_controlled_length)

    def after_events(self) -> None:
        """Forget the streams whose responses were sent."""
        for stream in list(self.sending):
            self.release(stream)
        self._registry.account(self)
        if self._empty_frames > MAX_EMPTY_FRAMES:
            self.abort()

    def _on_request(self, stream: int, fields: Fields, *, ended: bool) -> None:
        if self._last_stream is not None and stream > self._last_stream:
            self.reset(stream, ErrorCodes.REFUSED_STREAM)
            return
        method = next((value for name, value in fields if name == b":method"), b"")
        forwarded = [value for name, value in fields if name == b"x-forwarded-for"]
        kept = [field for field in fields if field[0] != b"x-forwarded-for"]
        kept.append((b"x-forwarded-for", b", ".join([*forwarded, self._address])))
        state = Http2Stream(self, stream, Http2Head(method, kept), self.clock())
        state.head_bytes = sum(len(name) + len(value) for name, value in fields)
        state.exchange.body_bytes = state.head_bytes
        state.request.ended = state.exchange.complete = ended
        self._streams[stream] = state
        if method == b"CONNECT":
            state.answer(405, "CONNECT is not supported: this is a service, not a forward proxy")
            return
        self._dispatcher.submit(state.exchange)

    def _on_stream(self, stream: int, state: Http2Stream, event: Event) -> None:
        request, exchange = state.request, state.exchange
        if isinstance(event, StreamReset):
            self._resets += 1
            self._forsake(stream)
            self._remove(stream)
            if self._resets > MAX_RESETS:
                self.abort()
            return
        if isinstance(event, DataReceived):
            request.add(event.data, event.flow_controlled_length, self.clock())
            exchange.body_bytes += len(event.data)
            # The last part and the end of a stream are sent as one frame, as they came.
            request.ended = exchange.complete = event.stream_ended is not None
        elif isinstance(event, TrailersReceived):
            request.trailers = event.headers
        else:
            request.ended = exchange.complete = True
        if not state.answered:
            self._dispatcher.on_body(exchange)
        self.release(stream)
